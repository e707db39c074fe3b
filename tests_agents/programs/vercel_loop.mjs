// The AI SDK's loop of tool calls. Arguments: the API ("chat", "responses" or "messages"), and
// whether it streams ("streamed" or "whole").
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, jsonSchema, streamText, tool } from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [api, how] = process.argv.slice(2);
const openai = createOpenAI();
const anthropic = createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1` });
const models = { chat: openai.chat, responses: openai.responses, messages: anthropic };
const number = { type: "number" };
const add = tool({
  description: "Add two numbers.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { a: number, b: number },
    required: ["a", "b"],
  }),
  execute: ({ a, b }) => String(a + b),
});
const request = {
  model: models[api]("any"),
  maxOutputTokens: 200,
  tools: { add },
  stopWhen: isStepCount(3),
  prompt: "What is 17 + 25?",
};
const result = how === "streamed" ? streamText(request) : await generateText(request);
console.log(JSON.stringify({ answer: await result.text, steps: (await result.steps).length }));
