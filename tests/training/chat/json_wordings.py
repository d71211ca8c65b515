"""How an answer in JSON is asked for: with a schema, with keys, or with neither. Knows no answer."""

from typing import Final

SURE: Final = (
    "certain",
    "known",
    "is_known",
    "confident",
    "sure",
    "is_certain",
    "found",
    "is_correct",
    "valid",
    "success",
)
FORMAT_NAMES: Final = (
    "llm_response",
    "response",
    "answer",
    "result",
    "output",
    "schema",
    "CountryInfo",
    "Person",
    "extraction",
    "capital",
)
COMMON: Final = (
    "You are a helpful assistant.", "Extract the data.", "Extract the information from the text.",
    "Answer the question.",
    "Extract the event information.", "You extract data from texts.", "Classify the text.",
    "You are a data extraction engine.",
    "You are a helpful assistant that answers in JSON.", "Answer shortly.", "Be precise.",
)  # fmt: skip
FREE: Final = (
    "Answer in JSON: {text}", "{text} Answer in JSON.", "{text} Reply as JSON.", "{text} Answer with JSON.",
    "In JSON: {text}",
    "Return JSON. {text}", "Give me the answer as a JSON object: {text}", "{text} Give the answer as JSON.",
    "{text} (as JSON)",
    "Reply in JSON. {text}", "{text}\nAnswer in JSON format.", "As JSON: {text}", "{text} Use JSON.",
    "JSON please: {text}",
    "Respond in JSON: {text}", "{text} Return a JSON object.", "Answer with a JSON object. {text}",
    "Please answer in JSON. {text}",
    "{text} Respond with a JSON object.", "Answer with JSON only: {text}", "Output JSON. {text}",
    "{text} Output JSON only.",
    "Convert this to JSON: {text}", "{text}\n\nAnswer with valid JSON only.", "Write this as JSON: {text}",
    "{text} json",
)  # fmt: skip
FREE_SYSTEM: Final = (
    "Answer in JSON.", "Always answer in JSON.", "You are a helpful assistant designed to output JSON.",
    "Reply with JSON only.",
    "You must output JSON.", "Respond in JSON format.", "Answer with a JSON object and nothing else.",
    "Output valid JSON.",
    "You are an API. Return JSON.", "Respond only with a valid JSON object.",
)  # fmt: skip
FREE_FENCED: Final = (
    "{text} Answer with a json block.", "Answer with a json block: {text}", "{text} Answer in a JSON code block.",
    "Answer with a ```json block. {text}", "{text}\nAnswer in a fenced json code block.",
    "{text} Put the JSON in a code block.",
    "Return a json code block. {text}", "{text} Reply with a ```json code block.",
)  # fmt: skip
KEYED: Final = (
    "Answer in JSON with the keys {keys}.", "Reply with a JSON object with the keys {keys}.",
    "Return JSON with the fields {keys}.",
    "Give me a JSON object with {keys}.", "Answer with JSON that has the keys {keys}.", "Extract {keys} as JSON.",
    "Respond with one JSON object and nothing else, with the keys {keys}.", "Use JSON with these keys: {keys}.",
    "Output a JSON object with the following keys: {keys}.", "JSON keys: {keys}.", "Answer as JSON ({keys}).",
    "Extract as JSON: {keys}.",
    "Answer in JSON format with the keys {keys} and nothing else.",
    "You must output in JSON format: an object of {typed}.",
    "Answer with a JSON object of {typed}.", "The answer must be a JSON object with {typed}.",
    "Answer in this format: {example}",
    "Use this JSON format: {example}", "Reply in the JSON format {example}.", "Respond in JSON like this:\n{example}",
    "JSON format: {example}", "Return exactly this structure:\n{example}", "Output format:\n{example}",
)  # fmt: skip
BY_SCHEMA: Final = (
    "Answer with JSON that matches this schema: {schema}", "Here is the JSON schema:\n{schema}",
    "JSON schema:\n{schema}",
    "Answer in JSON. The schema is {schema}", "Output JSON that conforms to the following schema:\n{schema}",
    "You must output a JSON object that follows this schema:\n\n{schema}\n",
    "Use this JSON schema for your answer:\n```json\n{schema}\n```",
    "### Structure\n<structure>\n{schema}\n</structure>",
    "Respond with an object that follows the JSON schema below.\n{schema}",
    "The output should be formatted as a JSON instance that conforms to the JSON schema below.\n\n{schema}",
)  # fmt: skip
FENCED_TOO: Final = (
    "Put it in a json block.",
    "Answer with a json block.",
    "Use a ```json code block.",
    "Write a fenced json block.",
)
TEXT_FORMS: Final = (
    "{text}", "{text}", "{text}", "{text}", "Text: {text}", "Extract the data from this text: {text}", '"{text}"',
    "<text>\n{text}\n</text>",
    "Extract the information: {text}", "Here is the text:\n{text}", "Input: {text}", "What does this say? {text}",
    "Text:\n\n{text}",
    "Classify: {text}", "Analyse this: {text}", "User input: {text}",
)  # fmt: skip
