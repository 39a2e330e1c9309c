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
