"""The settings of sampling, by the names of the engine's `Sampling`; settings.py has what else there is of a reply."""

from dataclasses import dataclass
from typing import Annotated, Any

from mlx_backend.declaration import Setting, declared, number, whole

_SHARE = number(0, 1)
_PENALTY = number(-2, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How the next token is chosen, by the names of the engine's `Sampling`."""

    temperature: Annotated[
        float | None,
        Setting(
            kind=number(0, 2),
            help="randomness of sampling; 0 always takes the most likely token",
            default="what the model's makers recommend, or 1; 0 for the demo model",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Setting(kind=_SHARE, help="choose among the most likely tokens that together have this probability"),
    ] = None
    top_k: Annotated[
        int | None,
        Setting(
            kind=whole(0, words="a whole number, or 0 for all"),
            help="choose among this many of the most likely tokens; 0: all",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Setting(
            kind=_SHARE,
            help="leave out tokens whose probability is below this fraction of the most likely one's",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Setting(
            kind=whole(0, (1 << 63) - 1, words="a whole number from 0 up"),
            help="the same seed gives the same reply to the same request",
            default="a new one for each reply",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Setting(kind=number(0, 10, above=True), help="above 1, recent tokens become less likely"),
    ] = None
    presence_penalty: Annotated[
        float | None,
        Setting(kind=_PENALTY, help="above 0, tokens that have been used become less likely"),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        Setting(kind=_PENALTY, help="above 0, tokens become less likely each time they are used"),
    ] = None
    xtc_probability: Annotated[
        float | None,
        Setting(kind=_SHARE, help="how often the most likely tokens are excluded (XTC sampling)"),
    ] = None
    xtc_threshold: Annotated[
        float | None,
        Setting(
            kind=number(0, 0.5),
            help="XTC excludes all tokens above this probability except the least likely of them",
        ),
    ] = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Those that are set, by name."""
        return {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}


SAMPLING = tuple(declared(SamplingSettings))
