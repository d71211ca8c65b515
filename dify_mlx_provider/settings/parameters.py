"""The settings in a model's panel in Dify: one table, used by `model_schema` and by the script for the model files.

Plain data as in Dify's YAML. A setting that is `required` has no on/off switch and is always sent; the others have a
switch, and their `default` is only where they start. There is no `stop`: Dify has a field of its own for it. Knows no
SDK and no server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.servers.base import MAX_UNREAD_TOKENS
from dify_mlx_provider.servers.efforts import LEVELS
from dify_mlx_provider.servers.mlx_backend import DEFAULT_ANSWER_RESERVE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_MAX_TOKENS = 8192
"""Where `max_tokens` starts: room for long reasoning and a long answer, and an end for a model that loops."""

type Rule = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterOptions:
    """What a model's panel depends on. `efforts` is empty for a model without a choice of effort.

    `sampling` are the server's own defaults; settings named in `ignored` have no effect there and are not shown.
    `default_max_tokens` is the limit while `max_tokens` is switched off; None if the server has one of its own.
    """

    efforts: Sequence[str] = LEVELS
    default_effort: str = "medium"
    reasons: bool = True
    thinking_budget: bool = True
    answer_reserve: bool = True
    structured_output: bool = True
    max_output: int = 131_072
    default_max_tokens: int | None = MAX_UNREAD_TOKENS
    sampling: Mapping[str, float] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


def parameter_rules(options: ParameterOptions) -> list[Rule]:
    """Return the rules in the order of the panel."""
    rules: list[Rule] = []
    half = max(1, options.max_output // 2)
    if len(options.efforts) > 1:
        rules.append({**_EFFORT, "default": options.default_effort, "options": list(options.efforts)})
    if options.reasons:
        if options.thinking_budget:
            default = min(_THINKING_BUDGET["default"], half)
            rules.append({**_THINKING_BUDGET, "default": default, "max": options.max_output})
        rules.append(dict(_REASONING_FORMAT))
    for rule in _SAMPLING:
        name = rule["name"]
        if name in options.ignored:
            continue
        if name == "max_tokens":
            default, help_ = min(DEFAULT_MAX_TOKENS, half), _with_default_limit(rule["help"], options)
            rules.append({**rule, "help": help_, "default": default, "max": options.max_output})
            if options.reasons and options.answer_reserve:
                reserve = min(DEFAULT_ANSWER_RESERVE, half)
                rules.append({**_ANSWER_RESERVE, "default": reserve, "max": half})
        elif (value := options.sampling.get(name)) is not None and _fits(rule, value):
            rules.append({**rule, "default": int(value) if rule["type"] == "int" else float(value)})
        else:
            rules.append(dict(rule))
    rules.append(dict(_LONG_CONVERSATIONS))
    if options.structured_output:
        rules += [dict(_RESPONSE_FORMAT), dict(_JSON_SCHEMA)]
    return [*rules, dict(_EXTRA_BODY)]


def _with_default_limit(help_: Mapping[str, str], options: ParameterOptions) -> dict[str, str]:
    """Say in the help of `max_tokens` what holds while it is switched off."""
    limit = options.default_max_tokens
    if limit is None:
        return {language: text + _SERVERS_OWN_LIMIT[language] for language, text in help_.items()}
    number = f"{min(limit, options.max_output):,}"
    return {language: text + _LIMIT_WHEN_OFF[language].format(number) for language, text in help_.items()}


def _fits(rule: Rule, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return bool(rule.get("min", value) <= value <= rule.get("max", value))


def _rule(name: str, kind: str, label: Sequence[str], help_: Sequence[str], **more: Any) -> Rule:
    return {
        "name": name,
        "type": kind,
        "required": False,
        **more,
        "label": _texts(*label),
        "help": _texts(*help_),
    }


def _texts(english: str, japanese: str, chinese: str) -> dict[str, str]:
    return {"en_US": english, "ja_JP": japanese, "zh_Hans": chinese}


_LIMIT_WHEN_OFF = _texts(" When switched off: {}.", "オフの場合は {} です。", "关闭时，上限为 {}。")
_SERVERS_OWN_LIMIT = _texts(
    " When switched off, the server's own limit applies.",
    "オフの場合はサーバー側の上限が使われます。",
    "关闭时，使用服务器自己的上限。",
)

_ANSWER_RESERVE = _rule(
    "answer_reserve",
    "int",
    ("Tokens kept for the answer", "回答用に残すトークン数", "为回答保留的词元数"),
    (
        "How much of Max tokens is kept for the answer, so that thinking cannot use up all of a small limit. "
        f"At most half is kept; 0 keeps nothing. When switched off: {DEFAULT_ANSWER_RESERVE:,}.",
        "最大トークン数のうち、思考に使わず回答用に残すトークン数です。上限が小さくても、思考だけで使い切ることがありません。"
        f"残せるのは半分までで、0 にすると残しません。オフの場合は {DEFAULT_ANSWER_RESERVE:,} です。",
        "从最大词元数中留出多少词元专门用于回答，这样即使上限较小，也不会全被思考用完。"
        f"最多留出一半，0 表示不留。关闭时，留出 {DEFAULT_ANSWER_RESERVE:,} 个。",
    ),
    default=DEFAULT_ANSWER_RESERVE,
    min=0,
    max=65_536,
)

_EFFORT = _rule(
    "reasoning_effort",
    "string",
    ("Reasoning effort", "推論の深さ", "推理强度"),
    (
        "How much the model thinks before it answers. More effort takes longer and is better at hard questions.",
        "回答の前にモデルがどれだけ考えるかを決めます。深くすると時間はかかりますが、難しい質問に強くなります。",
        "决定模型在回答前思考多少。强度越高，花的时间越长，也越能应对难题。",
    ),
    required=True,
    default="medium",
    options=list(LEVELS),
)

_THINKING_BUDGET = _rule(
    "thinking_budget",
    "int",
    ("Thinking budget", "思考トークンの上限", "思考词元上限"),
    (
        "The most tokens the model may spend on thinking; then it must answer. 0 means no thinking.",
        "思考に使えるトークン数の上限です。使い切ると回答に移ります。0 にすると思考せずに回答します。",
        "模型思考时最多可用的词元数，用完就必须开始回答。0 表示不思考，直接回答。",
    ),
    default=4096,
    min=0,
    max=131_072,
)

_REASONING_FORMAT = _rule(
    "reasoning_format",
    "string",
    ("Show thinking", "思考の表示", "显示思考"),
    (
        "Whether to show the thinking in a block of its own before the answer. The model thinks either way.",
        "回答の前に、思考を専用のブロックで表示するかどうかを選びます。hide でもモデルは思考します。",
        "是否在回答前用单独的折叠块显示思考过程。即使隐藏，模型照样会思考。",
    ),
    required=True,
    default="show",
    options=["show", "hide"],
)

_SAMPLING: tuple[Rule, ...] = (
    _rule(
        "temperature",
        "float",
        ("Temperature", "温度", "温度"),
        (
            "Low values give steady answers, high values varied ones. When switched off, the server's default applies.",
            "低くすると回答が安定し、高くすると多様になります。オフの場合はサーバー側の既定値が使われます。",
            "值越低，回答越稳定；值越高，回答越多样。关闭时使用服务器的默认值。",
        ),
        default=1.0,
        min=0.0,
        max=2.0,
        precision=2,
    ),
    _rule(
        "top_p",
        "float",
        ("Top P", "Top P", "Top P"),
        (
            "Consider only the likeliest tokens that together reach this probability. 1 keeps them all.",
            "確率を高い順に足していき、この値に達するまでのトークンだけを候補にします。1 にするとすべてが候補です。",
            "按概率从高到低累加到该值为止，只从这些词元中选取。1 表示全部保留。",
        ),
        default=1.0,
        min=0.0,
        max=1.0,
        precision=2,
    ),
    _rule(
        "max_tokens",
        "int",
        ("Max tokens", "最大トークン数", "最大词元数"),
        (
            "The most tokens the model may write. Its thinking counts too, so leave room when the effort is high.",
            "モデルが生成できるトークン数の上限です。思考の分も含まれるため、推論を深くする場合は余裕を持たせてください。",
            "模型最多能生成的词元数。思考内容也算在内，所以推理强度高时请多留一些余量。",
        ),
        default=DEFAULT_MAX_TOKENS,
        min=1,
        max=131_072,
    ),
    _rule(
        "top_k",
        "int",
        ("Top K", "Top K", "Top K"),
        (
            "Consider only this many of the likeliest tokens. 0 sets no limit.",
            "確率の高い順に、この数のトークンだけを候補にします。0 にすると制限しません。",
            "只从概率最高的若干个词元中选取，个数由此项决定。0 表示不限制。",
        ),
        default=0,
        min=0,
        max=200,
    ),
    _rule(
        "min_p",
        "float",
        ("Min P", "Min P", "Min P"),
        (
            "Ignore tokens whose probability is below this share of the likeliest token's. 0 ignores none.",
            "最も高い確率に対する割合がこの値に満たないトークンを候補から外します。0 にすると何も外しません。",
            "词元的概率与最高概率之比低于该值时，就排除这个词元。0 表示不排除。",
        ),
        default=0.0,
        min=0.0,
        max=1.0,
        precision=2,
    ),
    # Without an upper bound Dify shows a number field instead of a slider.
    _rule(
        "seed",
        "int",
        ("Seed", "シード", "随机种子"),
        (
            "The same seed, settings and conversation give the same answer, as far as the server can reproduce it.",
            "シード、設定、会話がすべて同じなら、サーバーが再現できる範囲で同じ回答になります。",
            "种子、设置和对话都相同时，服务器会尽可能给出相同的回答。",
        ),
        default=0,
        min=0,
    ),
    _rule(
        "presence_penalty",
        "float",
        ("Presence penalty", "存在ペナルティ", "存在惩罚"),
        (
            "Above 0, the model avoids tokens it has already written; below 0, it prefers them.",
            "0 より大きくすると一度出たトークンが出にくくなり、0 より小さくすると出やすくなります。",
            "大于 0 时，模型会避开已经出现过的词元；小于 0 时，则更偏向这些词元。",
        ),
        default=0.0,
        min=-2.0,
        max=2.0,
        precision=2,
    ),
    _rule(
        "frequency_penalty",
        "float",
        ("Frequency penalty", "頻度ペナルティ", "频率惩罚"),
        (
            "Like the presence penalty, but stronger the more often a token has been written.",
            "存在ペナルティと似ていますが、出た回数が多いトークンほど強く働きます。",
            "与“存在惩罚”类似，但词元出现的次数越多，作用越强。",
        ),
        default=0.0,
        min=-2.0,
        max=2.0,
        precision=2,
    ),
    _rule(
        "repetition_penalty",
        "float",
        ("Repetition penalty", "繰り返しペナルティ", "重复惩罚"),
        (
            "Above 1, recent tokens become less likely, which breaks loops. 1 changes nothing.",
            "1 より大きくすると直近のトークンが出にくくなり、繰り返しを防げます。1 では何も変わりません。",
            "大于 1 时，最近出现过的词元不容易再次出现，可以避免回答陷入重复。1 表示没有影响。",
        ),
        default=1.0,
        min=0.5,
        max=2.0,
        precision=2,
    ),
)

_LONG_CONVERSATIONS = _rule(
    "long_conversations",
    "string",
    ("Long conversations", "長い会話", "长对话"),
    (
        "When a conversation outgrows the context: shorten drops the oldest turns, refuse gives an error.",
        "会話がコンテキストに収まらなくなったとき、shorten では古いやり取りから順に省き、refuse ではエラーにします。",
        "对话超出上下文长度时怎么办：shorten 会从最早的轮次开始省略，refuse 会直接报错。",
    ),
    required=True,
    default="shorten",
    options=["shorten", "refuse"],
)

# Dify's workflows look for the option json_schema here when a node asks for structured output.
_RESPONSE_FORMAT = _rule(
    "response_format",
    "string",
    ("Response format", "回答形式", "回复格式"),
    (
        "json_object makes the answer a single JSON object; json_schema makes it fit the schema below.",
        "json_object では回答が 1 つの JSON オブジェクトになり、json_schema では下のスキーマに沿った JSON になります。",
        "选 json_object，回答就是一个 JSON 对象；选 json_schema，回答会符合下方的 Schema。",
    ),
    options=["text", "json_object", "json_schema"],
)

_JSON_SCHEMA = _rule(
    "json_schema",
    "text",
    ("JSON schema", "JSON スキーマ", "JSON Schema"),
    (
        'The schema the answer must fit, as JSON: {"type": "object", "properties": …}.',
        '回答の形式を決めるスキーマを JSON で入力します：{"type": "object", "properties": …}',
        '回答必须符合的 Schema，用 JSON 填写：{"type": "object", "properties": …}',
    ),
)

_EXTRA_BODY = _rule(
    "extra_body",
    "text",
    ("Extra body (JSON)", "追加のリクエスト項目（JSON）", "附加请求字段（JSON）"),
    (
        'More fields to send to the server, as a JSON object: {"logit_bias": {"42": -100}}. They override the settings '
        "above.",
        'サーバーに追加で送る項目を JSON オブジェクトで入力します（例：{"logit_bias": {"42": -100}}）。'
        "上の設定より優先されます。",
        '要额外发送给服务器的字段，写成 JSON 对象：{"logit_bias": {"42": -100}}。这里的值优先于上面的设置。',
    ),
)
