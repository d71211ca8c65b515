// A chat as the server gets it, and a reply as it comes: no elements, only what is said.
import { stream } from "./api.js";

export const SAMPLING = {
  temperature: [0, 2, 0.1], top_p: [0, 1, 0.05], top_k: [0, 1000, 1], min_p: [0, 1, 0.01], repetition_penalty: [0.1, 10, 0.05],
  presence_penalty: [-2, 2, 0.1], frequency_penalty: [-2, 2, 0.1], seed: [0, 2 ** 31, 1], max_tokens: [1, 10_000_000, 1],
  thinking_budget: [0, 10_000_000, 1],
};

function wire(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.id, content: message.text };
  if (message.role === "user") {
    const images = message.images.map((address) => ({ type: "image_url", image_url: { url: address } }));
    return { role: "user", content: images.length ? [...images, { type: "text", text: message.text }] : message.text };
  }
  const calls = message.calls.map(({ id, name, input }) => ({ id, type: "function", function: { name, arguments: input } }));
  return {
    role: "assistant", content: message.text,
    ...(message.reasoning && { reasoning_content: message.reasoning }), // which of it a model sees, the server knows
    ...(calls.length && { tool_calls: calls }),
  };
}

/** The body of a request for the next message of a chat. */
export function requestOf(chat, effort) {
  const said = chat.messages.filter((each) => each.role !== "assistant" || each.text || each.calls.length);
  return {
    model: chat.model,
    messages: [...(chat.system.trim() ? [{ role: "system", content: chat.system }] : []), ...said.map(wire)],
    stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, return_progress: true,
    ...chat.sampling,
    ...(effort && { reasoning_effort: effort }),
    ...(chat.tools.trim() && { tools: JSON.parse(chat.tools) }),
  };
}

export const newReply = () => ({ role: "assistant", text: "", reasoning: "", calls: [], state: "waiting", seconds: 0 });

/** Have a reply come into a message. Its state is `done`, `stopped` or `error` at the end. */
export async function receive(message, body, signal) {
  const began = performance.now();
  let reasoningBegan = null, spent = message.seconds;
  Object.assign(message, { state: "waiting", error: null, finish: null, progress: null, queued: 0, usage: null, timings: null, answeredBy: body.model });
  try {
    for await (const event of stream("v1/chat/completions", body, signal)) {
      for (const name of ["usage", "timings", "queued"]) if (event[name]) message[name] = event[name];
      if (event.reasoning) message.decided = event.reasoning;
      if (event.prompt_progress) message.progress = event.prompt_progress;
      for (const { delta, finish_reason } of event.choices) {
        if (delta.reasoning_content) {
          message.state = "reasoning";
          reasoningBegan ??= performance.now();
          message.reasoning += delta.reasoning_content;
          message.seconds = spent + (performance.now() - reasoningBegan) / 1000;
        } else if (delta.content || delta.tool_calls) {
          message.state = "answering";
          [reasoningBegan, spent] = [null, message.seconds];
        }
        message.firstToken ??= message.state === "waiting" ? null : (performance.now() - began) / 1000;
        message.text += delta.content || "";
        for (const { index, id, function: called } of delta.tool_calls || []) {
          const call = (message.calls[index] ||= { id: "", name: "", input: "" });
          call.id = id || call.id;
          call.name += called?.name || "";
          call.input += called?.arguments || "";
        }
        if (finish_reason) message.finish = finish_reason;
      }
    }
    message.state = "done";
  } catch (error) {
    message.state = error.name === "AbortError" ? "stopped" : "error";
    if (message.state === "error") message.error = { text: error.message, code: error.code };
  }
  message.progress = null;
}

/** A chat as markdown, for people. */
export function asMarkdown(chat) {
  const parts = chat.messages.map((message) => {
    const reasoning = message.reasoning ? `<details><summary>Reasoning</summary>\n\n${message.reasoning.trim()}\n\n</details>\n\n` : "";
    const calls = (message.calls || []).map(({ name, input }) => `\`\`\`json\n${name}(${input})\n\`\`\`\n\n`).join("");
    return `## ${message.role}\n\n${reasoning}${message.text}\n\n${calls}`;
  });
  return `# ${chat.title}\n\n${chat.model}\n\n${chat.system ? `## system\n\n${chat.system}\n\n` : ""}${parts.join("")}`.trimEnd() + "\n";
}
