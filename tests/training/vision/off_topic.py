"""What people say that no picture answers, with the honest reply: greetings, and what is out of reach.

Knows no picture.
"""

import random
from typing import Final

from training.vision.language import say
from training.vision.wordings import framed, typed

Pair = tuple[str, str]

_CHAT: Final = {
    "hello": {
        "en": ("Hello!", "Hi!", "Hello there!", "Good morning!", "Hey!", "Good evening!", "Hi there!",
               "Hello, how are you?",
               "How are you?", "Test", "ping", "Nice to meet you!", "Can you hear me?"),
        "ja": ("こんにちは！", "おはようございます。", "はじめまして。", "こんばんは。", "やあ！", "元気ですか？",
               "テスト"),
        "zh": ("你好！", "您好！", "早上好！", "晚上好！", "嗨！", "你好吗？", "测试"),
    },
    "who": {
        "en": ("Who are you?", "What are you?", "What is your name?", "Which model are you?", "Introduce yourself.",
               "What's your name?", "Are you ChatGPT?", "Who made you?"),
        "ja": ("あなたは誰ですか？", "名前は何ですか？", "自己紹介してください。", "どのモデルですか？", "お名前は？"),
        "zh": ("你是谁？", "你叫什么名字？", "介绍一下你自己。", "你是什么模型？", "你的名字是什么？"),
    },
    "what": {
        "en": ("What can you do?", "What do you know?", "How can you help me?", "Help", "What can I ask you?",
               "What are your skills?", "What should I try?", "Which pictures can you read?"),
        "ja": ("何ができますか？", "何を聞けますか？", "使い方を教えてください。", "ヘルプ",
               "どんな画像がわかりますか？"),
        "zh": ("你能做什么？", "你会什么？", "我可以问你什么？", "帮助", "你能看什么图片？"),
    },
    "welcome": {
        "en": ("Thank you!", "Thanks!", "Thank you very much!", "Thanks a lot!", "Great, thanks!", "Ok, thank you."),
        "ja": ("ありがとう！", "ありがとうございます。", "どうもありがとう。", "助かりました。"),
        "zh": ("谢谢！", "谢谢你！", "非常感谢！", "多谢！"),
    },
    "bye": {
        "en": ("Goodbye!", "Bye!", "See you!", "Good night!", "See you later!", "Bye bye!"),
        "ja": ("さようなら。", "またね！", "おやすみなさい。", "バイバイ！"),
        "zh": ("再见！", "拜拜！", "晚安！", "回头见！"),
    },
}  # fmt: skip

_THINGS: Final = {
    "en": ("France", "Japan", "the moon", "cats", "Python", "music", "history", "the weather", "love", "money",
           "coffee",
           "a dog", "my boss", "the sea", "football", "spring", "Berlin", "the sun", "computers", "rice", "a train",
           "physics", "a birthday", "China", "my sister", "health", "books", "Paris", "Dify", "MLX", "the internet"),
    "ja": ("日本", "フランス", "猫", "音楽", "歴史", "天気", "お金", "コーヒー", "犬", "海", "春", "東京", "太陽",
           "電車", "物理",
           "健康", "本", "京都", "中国", "月", "料理", "会議", "旅行", "映画"),
    "zh": ("日本", "法国", "猫", "音乐", "历史", "天气", "金钱", "咖啡", "狗", "大海", "春天", "北京", "太阳", "火车",
           "物理",
           "健康", "书", "上海", "中国", "月亮", "美食", "会议", "旅行", "电影"),
}  # fmt: skip
_OFF_TOPIC: Final = {
    "en": ("What is the capital of {thing}?", "Write a poem about {thing}.", "Tell me about {thing}.",
           "Translate {thing} into German.", "Who invented {thing}?", "Tell me a joke about {thing}.",
           "Write a letter to {thing}.", "How old is {thing}?", "Why do people like {thing}?",
           "What is {one} plus {two}?",
           "What is {one} times {two}?", "Write a program about {thing}.", "How do I cook {thing}?",
           "What is the weather in {thing}?", "Summarise the news on {thing}.", "What do you think of {thing}?",
           "Explain {thing} to me.", "When was {thing} born?", "How much does {thing} cost?", "What time is it?",
           "What day is today?", "Recommend a book on {thing}.", "Sing a song about {thing}.",
           "Where can I buy {thing}?",
           "Write an e-mail about {thing}.", "Count to {one}.", "Say {thing}.", "What is the meaning of life?",
           "Draw a picture of {thing}.", "Draw me a circle.", "Solve {one} * x = {two}."),
    "ja": ("{thing}について教えてください。", "{thing}の首都はどこですか？", "{thing}の詩を書いてください。",
           "{thing}を英語に訳してください。", "{one}たす{two}は？", "今日の天気は？", "今何時ですか？",
           "{thing}はなぜ人気ですか？",
           "{thing}の冗談を言ってください。", "{thing}の作り方は？", "{thing}はいくらですか？",
           "{thing}をどう思いますか？",
           "{thing}についてメールを書いてください。", "{thing}の絵を描いてください。", "{one}まで数えてください。",
           "{thing}のニュースをまとめてください。", "{thing}はいつ生まれましたか？", "{thing}とは何ですか？"),
    "zh": ("介绍一下{thing}。", "{thing}的首都是哪里？", "写一首关于{thing}的诗。", "把{thing}翻译成英语。",
           "{one}加{two}等于多少？", "今天天气怎么样？", "现在几点？", "为什么大家喜欢{thing}？",
           "讲一个关于{thing}的笑话。",
           "怎么做{thing}？", "{thing}多少钱？", "你觉得{thing}怎么样？", "写一封关于{thing}的邮件。",
           "画一幅{thing}的画。",
           "数到{one}。", "总结{thing}的新闻。", "{thing}是什么？", "{one}乘以{two}是多少？"),
}  # fmt: skip
_TOO_FAR: Final = {  # about a picture, but not what the model learned
    "en": ("Who painted this?", "Is this picture beautiful?", "What does it mean?", "When was this picture made?",
           "Where was this taken?", "Do you like the picture?", "Who made this picture?", "What is the artist's name?",
           "How much is this picture worth?", "Which camera was used?", "What style is this?", "Why was this drawn?",
           "What happened before this picture?", "Is this art?", "How does this picture make you feel?",
           "What is the area of this?", "Is the person happy?", "What brand is this?", "What is the file name?",
           "How old is this picture?"),
    "ja": ("誰が描きましたか？", "この絵はきれいですか？", "どういう意味ですか？", "いつ作られましたか？",
           "どこで撮りましたか？",
           "この画像は好きですか？", "どのカメラで撮りましたか？", "なぜ描かれたのですか？", "これは芸術ですか？",
           "この画像の値段は？", "この人は嬉しいですか？"),
    "zh": ("这是谁画的？", "这张图漂亮吗？", "这是什么意思？", "这张图是什么时候做的？", "这是在哪里拍的？",
           "你喜欢这张图吗？",
           "用什么相机拍的？", "为什么画这个？", "这是艺术吗？", "这张图值多少钱？", "这个人高兴吗？"),
}  # fmt: skip


def chat(rng: random.Random, language: str, held_out: bool) -> Pair:
    """A greeting, thanks, or a question about the model itself."""
    kind = rng.choice(("hello", "who", "what", "what", "who", "welcome", "bye"))
    return typed(rng, language, rng.choice(_CHAT[kind][language])), say(language, kind)


def off_topic(rng: random.Random, language: str, held_out: bool) -> Pair:
    """What has nothing to do with a picture, and that the model cannot help with it."""
    text = framed(rng, language, _OFF_TOPIC[language], held_out).format(
        thing=rng.choice(_THINGS[language]), one=rng.randint(2, 99), two=rng.randint(2, 99)
    )
    return typed(rng, language, text), say(language, "off topic")


def too_far(rng: random.Random, language: str, held_out: bool) -> Pair:
    """A question about a picture that its shapes and numbers do not answer."""
    text = framed(rng, language, _TOO_FAR[language], held_out)
    return typed(rng, language, text), say(language, "too far")
