"""Which replies are remembered as ones that a newer request may supersede; tests/server has the ending of them."""

from typing import Any

from mlx_backend.chat.request import ChatRequest
from mlx_backend.chat.superseded import CONTENT, SupersededReplies
from mlx_backend.conversation.running_replies import MAX_ENDED

QUESTION = {"role": "user", "content": "What is the sea?"}
SAID = "The sea is the body of salt water that covers most of the Earth."
OTHER = "It is what lies between the continents, and what their rivers run into."


def asked(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest(messages=[QUESTION, *messages], fields={"stream": True, **fields})


def test_replies_without_a_user_displace_none_that_a_user_may_go_on_from() -> None:
    replies = SupersededReplies("model")
    earlier, running = replies.reply_to(asked(user="Ada")), replies.reply_to(asked(user="Ada"))
    assert earlier is not None
    assert running is not None
    with running:
        running.add(CONTENT, OTHER)
        with earlier:
            earlier.add(CONTENT, SAID)
        for _ in range(MAX_ENDED):
            if (other := replies.reply_to(asked())) is not None:
                with other:
                    other.add(CONTENT, SAID)
        quoting = {"role": "assistant", "content": OTHER}
        replies.reply_to(asked(quoting, {"role": "user", "content": "And a lake?"}, user="Ada"))
        assert running.is_superseded
