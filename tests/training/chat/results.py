"""What tools answer: times, words, numbers, prose, JSON of any shape and length; and what the model says of it.

Knows nothing of dialogues, Harmony or tokens.
"""

import json
import random
from typing import Any, Final

from training.chat.exchange import Reply
from training.chat.words import NAME_PARTS, PARAMETERS, invent, oddity, person, place, sentence, things

MAX_REPEATED: Final = 240  # characters of a result that are repeated, from its beginning
CUT_AFTER: Final = 120  # characters: a long result is cut at the first space, comma or line after these
_TIME_KEYS: Final = (
    "current_iso", "iso", "time", "current_time", "datetime", "now", "local_time", "current_datetime", "date_time",
    "utc_time",
    "user_local_iso", "timestamp_iso",
)  # fmt: skip
_NUMBER_KEYS: Final = (
    "current_timestamp",
    "timestamp",
    "unix",
    "epoch",
    "unix_time",
    "seconds",
    "day_of_year",
    "week",
)


def random_date(rng: random.Random) -> str:
    """Return a date such as 2026-05-01."""
    return f"{rng.randint(1990, 2049)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def random_time(rng: random.Random) -> str:
    """Return a time in one of the formats that tools use."""
    day = random_date(rng)
    hour = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    second = rng.choice(("00", f"{rng.randint(0, 59):02}"))
    full = f"{day} {hour}:{second}"
    return rng.choice((full, full, f"{day}T{hour}:{second}Z", f"{day} {hour}", hour, day))


def _iso(rng: random.Random) -> str:
    hour = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}"
    fraction = f".{rng.randint(0, 999_999):06}" if rng.random() < 0.4 else ""
    zone = rng.choice(("", "Z", "+00:00", "+00:00", "+02:00", "+09:00", "-05:00"))
    return f"{random_date(rng)}T{hour}{fraction}{zone}"


def time_object(rng: random.Random) -> tuple[str, str]:
    """Return a JSON object with a time in it among other things, and the time."""
    time = rng.choice((_iso, _iso, random_time))(rng)
    items: list[tuple[str, Any]] = [(rng.choice(_TIME_KEYS), time)]
    for _ in range(rng.choice((0, 1, 1, 2))):
        items.append((rng.choice(_NUMBER_KEYS), rng.randint(1_000_000_000, 2_000_000_000)))
    if rng.random() < 0.4:
        items.append(
            (
                rng.choice(("timezone", "tz", "user_timezone")),
                rng.choice(("UTC", "Europe/Berlin", "Asia/Tokyo")),
            )
        )
    rng.shuffle(items)
    return _dumps(rng, dict(items)), time


def parameter_name(rng: random.Random) -> str:
    """Return the name of a parameter or of a field of an object."""
    draw = rng.random()
    if draw < 0.6:
        return rng.choice(PARAMETERS)
    if draw < 0.8:
        return invent(rng)
    return f"{rng.choice(NAME_PARTS)}_{invent(rng) if rng.random() < 0.5 else rng.choice(NAME_PARTS)}"


def _dumps(rng: random.Random, value: Any) -> str:
    draw = rng.random()
    if draw < 0.55:
        return json.dumps(value, ensure_ascii=False)
    if draw < 0.8:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=rng.choice((2, 4)))


def _value(rng: random.Random, depth: int) -> Any:
    """Return a random JSON value, nested at most `depth` deep."""
    draw = rng.random()
    if depth and draw < 0.15:
        return [_value(rng, 0) for _ in range(rng.randint(1, 3))]
    if depth and draw < 0.25:
        return {parameter_name(rng): _value(rng, depth - 1) for _ in range(rng.randint(1, 3))}
    if draw < 0.5:
        return rng.choice(
            (
                rng.randint(0, 9999),
                rng.randint(0, 99),
                rng.randint(0, 999) / 10,
                True,
                False,
                None,
                rng.randint(0, 2**31),
            )
        )
    return rng.choice((things(rng, 2), invent(rng), oddity(rng), random_time(rng), person(rng), place(rng)))


def json_object(rng: random.Random) -> str:
    """Return a small JSON object, some with keys that begin alike."""
    names = [parameter_name(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.3:
        stem = rng.choice(NAME_PARTS)
        names = [f"{stem}_{name}" for name in names]
    return _dumps(rng, {name: _value(rng, 2) for name in names})


def _rows(rng: random.Random, count: int) -> str:
    """Return what searches return: a list of objects of the same fields."""
    names = [parameter_name(rng) for _ in range(rng.randint(2, 5))]
    rows = [{name: rng.choice((_scalar, _scalar, _prose))(rng) for name in names} for _ in range(count)]
    return _dumps(
        rng, rows if rng.random() < 0.5 else {rng.choice(("results", "items", "data", "notes")): rows}
    )


def _scalar(rng: random.Random) -> Any:
    return _value(rng, 0)


def _prose(rng: random.Random) -> str:
    return sentence(rng, 3, 14)


def _long(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.5:
        return _rows(rng, rng.choice((2, 3, 4, 6, 10)))
    if draw < 0.7:
        return _dumps(rng, {parameter_name(rng): _value(rng, 2) for _ in range(rng.randint(8, 20))})
    return rng.choice((" ", "\n", "\n\n")).join(sentence(rng, 3, 14) for _ in range(rng.randint(5, 20)))


def _some_things(rng: random.Random) -> str:
    return things(rng, 3)


def result(rng: random.Random) -> str:
    """Return what a tool may answer."""
    draw = rng.random()
    if draw < 0.25:
        return random_time(rng)
    if draw < 0.4:
        return things(rng, 5)
    if draw < 0.5:
        return (
            str(rng.randint(0, 99999)) if rng.random() < 0.5 else f"{rng.randint(0, 99)}.{rng.randint(0, 99)}"
        )
    if draw < 0.6:
        return " ".join(sentence(rng, 3, 12) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    if draw < 0.7:
        return time_object(rng)[0]
    if draw < 0.83:
        return json_object(rng)
    if draw < 0.9:
        return "\n".join(rng.choice((oddity, _some_things))(rng) for _ in range(rng.randint(1, 3)))
    return _long(rng)


def weather(rng: random.Random) -> str:
    """Return what a weather service may answer."""
    sky = rng.choice(("sunny", "cloudy", "rainy", "snow", "windy", "fog", "Sunny", "light rain", invent(rng)))
    degrees = rng.randint(-10, 39)
    if rng.random() < 0.3:
        items: list[tuple[str, Any]] = [
            (rng.choice(("temperature", "temp", "temp_c", "degrees")), degrees),
            (rng.choice(("condition", "description", "sky", "forecast", "weather")), sky),
        ]
        if rng.random() < 0.5:
            items.append((rng.choice(("unit", "units")), rng.choice(("celsius", "C", "fahrenheit"))))
        if rng.random() < 0.5:
            items.insert(0, (rng.choice(("city", "location")), place(rng)))
        return _dumps(rng, dict(items))
    return rng.choice(
        (
            f"{sky}, {degrees} degrees",
            f"{sky} {degrees}",
            sky,
            f"{sky}, {degrees}°C",
            f"{degrees}°C and {sky}",
        )
    )


def shortened(text: str) -> str:
    """Return a result as it is repeated: as it is, or if it is long its beginning and an ellipsis."""
    if len(text) <= MAX_REPEATED:
        return text
    at = next((i for i in range(CUT_AFTER, len(text)) if text[i] in " \n,"), CUT_AFTER)
    return text[:at].rstrip() + " …"


def result_reply(prefix: str, result: str) -> Reply:
    """Return the reply that tells a tool's result."""
    medium = "The tool has answered. I pass its words on to the user as they are."
    high = (
        "Let me read the result once more. The call went well and the user wants just this. "
        "I must not change any part of it. I copy it from the first letter to the last."
    )
    said = shortened(result)
    return Reply(
        ("Tell the result.", medium, high),
        f"{prefix}{said}",
        whole=f"{prefix}{result}" if said != result else "",
    )
