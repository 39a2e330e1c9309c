// Calls a server with the packages of OpenAI, Anthropic and Ollama, as their users would. Prints one JSON object.
//
//     node cases.cjs CASE URL MODEL

const [name, url, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "Plan a trip to Oslo." }];
const schema = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Bergen"] }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};

const openai = () => new (require("openai").OpenAI)({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const anthropic = () => new (require("@anthropic-ai/sdk").Anthropic)({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const ollama = () => new (require("ollama").Ollama)({ host: url });

async function joined(stream, textOf) {
  const texts = [];
  for await (const event of stream) texts.push(textOf(event) || "");
  return texts.join("");
}

const cases = {
  async openai_chat() {
    const body = { model, messages, temperature: 0, max_tokens: 20 };
    const whole = await openai().chat.completions.create(body);
    const stream = await openai().chat.completions.create({ ...body, stream: true });
    return { whole: whole.choices[0].message.content, streamed: await joined(stream, (chunk) => chunk.choices[0]?.delta.content) };
  },
  async openai_tools() {
    const tool = { type: "function", function: { name: "get_weather", parameters: schema, strict: true } };
    const body = { model, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
    const final = await openai().chat.completions.stream(body).finalChatCompletion();
    return JSON.parse(final.choices[0].message.tool_calls[0].function.arguments);
  },
  async openai_responses() {
    const body = { model, input: messages[0].content, temperature: 0, max_output_tokens: 20 };
    const whole = await openai().responses.create(body);
    const stream = openai().responses.stream(body);
    const streamed = await joined(stream, (event) => (event.type === "response.output_text.delta" ? event.delta : ""));
    return { whole: whole.output_text, streamed, status: whole.status };
  },
  async openai_form() {
    const format = { type: "json_schema", json_schema: { name: "weather", schema, strict: true } };
    const answer = await openai().chat.completions.create({ model, messages, response_format: format });
    return JSON.parse(answer.choices[0].message.content);
  },
  async openai_result() {
    const tool = { type: "function", function: { name: "get_weather", parameters: schema, strict: true } };
    const body = { model, messages, tools: [tool], max_tokens: 100 };
    const called = (await openai().chat.completions.create({ ...body, tool_choice: "required", parallel_tool_calls: false })).choices[0].message;
    const result = { role: "tool", tool_call_id: called.tool_calls[0].id, content: "4 degrees" };
    const answer = await openai().chat.completions.create({ ...body, messages: [...messages, called, result], tool_choice: "none" });
    return { text: answer.choices[0].message.content };
  },
  async openai_thinking() {
    const answer = await openai().chat.completions.create({ model, messages, temperature: 0, max_tokens: 20 });
    return { thinking: answer.choices[0].message.reasoning_content };
  },
  async openai_leaving() {
    const body = { model, messages, max_tokens: 1500, ignore_eos: true, stream: true };
    for await (const _ of await openai().chat.completions.create(body)) break;
    return {};
  },
  async openai_many() {
    const client = openai();
    const body = { model, messages, temperature: 0, max_tokens: 20 };
    const texts = await Promise.all(Array.from({ length: 32 }, async () => joined(await client.chat.completions.create({ ...body, stream: true }), (chunk) => chunk.choices[0]?.delta.content)));
    return { texts };
  },
  async openai_error() {
    try {
      await openai().chat.completions.create({ model: "absent", messages });
    } catch (error) {
      return { name: error.constructor.name, status: error.status, code: error.code };
    }
  },
  async anthropic_messages() {
    const body = { model, messages, max_tokens: 20, temperature: 0 };
    const whole = await anthropic().messages.create(body);
    const stream = anthropic().messages.stream(body);
    let streamed = "";
    stream.on("text", (text) => (streamed += text));
    await stream.finalMessage();
    return { whole: whole.content[0].text, streamed, stop_reason: whole.stop_reason };
  },
  async anthropic_tools() {
    const tool = { name: "get_weather", input_schema: schema, strict: true };
    const choice = { type: "any", disable_parallel_tool_use: true };
    const stream = anthropic().messages.stream({ model, messages, max_tokens: 200, tools: [tool], tool_choice: choice });
    const message = await stream.finalMessage();
    return message.content.find((block) => block.type === "tool_use").input;
  },
  async anthropic_form() {
    const format = { type: "json_schema", schema };
    const answer = await anthropic().messages.create({ model, messages, max_tokens: 100, output_config: { format } });
    return JSON.parse(answer.content[0].text);
  },
  async anthropic_result() {
    const body = { model, messages, max_tokens: 100, tools: [{ name: "get_weather", input_schema: schema, strict: true }] };
    const called = await anthropic().messages.create({ ...body, tool_choice: { type: "any", disable_parallel_tool_use: true } });
    const result = { type: "tool_result", tool_use_id: called.content.find((block) => block.type === "tool_use").id, content: "4 degrees" };
    const turns = [...messages, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
    const answer = await anthropic().messages.create({ ...body, messages: turns, tool_choice: { type: "none" } });
    return { text: answer.content[0].text };
  },
  async anthropic_thinking() {
    const message = await anthropic().messages.stream({ model, messages, max_tokens: 20, temperature: 0 }).finalMessage();
    return { thinking: message.content[0].thinking };
  },
  async anthropic_leaving() {
    const body = { model, messages, max_tokens: 1500, ignore_eos: true, stream: true };
    for await (const event of await anthropic().messages.create(body)) if (event.type === "content_block_delta") break;
    return {};
  },
  async anthropic_many() {
    const client = anthropic();
    const body = { model, messages, max_tokens: 20, temperature: 0 };
    const final = () => client.messages.stream(body).finalMessage();
    const answers = await Promise.all(Array.from({ length: 32 }, final));
    return { texts: answers.map((message) => message.content[0].text) };
  },
  async anthropic_error() {
    try {
      await anthropic().messages.create({ model: "absent", messages, max_tokens: 1 });
    } catch (error) {
      return { name: error.constructor.name, status: error.status, type: error.error.error.type };
    }
  },
  async ollama_chat() {
    const body = { model, messages, options: { temperature: 0, num_predict: 20 } };
    const whole = await ollama().chat(body);
    const stream = await ollama().chat({ ...body, stream: true });
    return { whole: whole.message.content, streamed: await joined(stream, (line) => line.message.content) };
  },
  async ollama_format() {
    const answer = await ollama().chat({ model, messages, format: schema });
    return JSON.parse(answer.message.content);
  },
  async ollama_result() {
    const call = { function: { name: "get_weather", arguments: { city: "Oslo", unit: "C" } } };
    const turns = [...messages, { role: "assistant", content: "", tool_calls: [call] }, { role: "tool", tool_name: "get_weather", content: "4 degrees" }];
    const answer = await ollama().chat({ model, messages: turns, options: { temperature: 0, num_predict: 100 } });
    return { text: answer.message.content };
  },
  async ollama_thinking() {
    const answer = await ollama().chat({ model, messages, think: true, options: { temperature: 0, num_predict: 20 } });
    return { thinking: answer.message.thinking };
  },
  async ollama_leaving() {
    for await (const _ of await ollama().chat({ model, messages, stream: true, options: { num_predict: 1500 } })) break;
    return {};
  },
  async ollama_many() {
    const client = ollama();
    const body = { model, messages, stream: true, options: { temperature: 0, num_predict: 20 } };
    const texts = await Promise.all(Array.from({ length: 32 }, async () => joined(await client.chat(body), (line) => line.message.content)));
    return { texts };
  },
  async ollama_error() {
    try {
      await ollama().chat({ model: "absent", messages });
    } catch (error) {
      return { name: error.name, status: error.status_code };
    }
  },
};

cases[name]().then(
  (result) => console.log(JSON.stringify(result)),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
