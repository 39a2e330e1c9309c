// Which models make text: only these are offered for a chat. The server's list of models says it.

import { server } from "./server.js";

const cards = new Map();
let names = [];
let wanted = "";

/** Return the names of the models that make text, or of which nothing else is known. */
export const textModels = () => names.filter((name) => makesText(cards.get(name)));

function makesText(card) {
  if (!card) return true;
  if (card.task !== undefined && card.task !== "generate") return false;
  const made = card.capabilities?.out;
  return !Array.isArray(made) || made.includes("text");
}

/** Take the models of a snapshot; call `onChange`, and dispatch `modelschange`, when more is known of them. */
export async function knowModels(models, onChange) {
  names = models.filter(({ unlisted }) => !unlisted).map(({ model }) => model);
  const seen = JSON.stringify([server.key.length, models.map(({ model, state }) => [model, state])]);
  if (seen === wanted) return;
  wanted = seen;
  try {
    const { data } = await server.call("v1/models").then((response) => response.json());
    for (const card of data) cards.set(card.id, card);
  } catch { // the stream of events shows that the server cannot be reached
    wanted = "";
  }
  onChange();
  document.dispatchEvent(new Event("modelschange"));
}
