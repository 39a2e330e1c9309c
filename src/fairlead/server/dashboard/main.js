// The dashboard's entry point: passes the server's data to the modules that show it. The pages are offered in
// the order in which they are imported.

import { redrawChat, showModels, useChatsOf } from "./chat.js";
import { setAttribute, setText } from "./element.js";
import { offerActions, redrawFleet, showFleet } from "./fleet.js";
import { askForKey } from "./key.js";
import { server } from "./server.js";
import { redrawTotals, showHistory, showTotals } from "./totals.js";
import "./people.js";
import "./requests.js";
import { seeOwn, showErrors } from "./timings.js";
import "./usage.js";
import { offerBudgets } from "./budgets.js";
import { offerAccesses } from "./accesses.js";
import "./connect.js";
import { redrawPages, startPages } from "./router.js";
import { chooseFirstLanguage, chooseLanguage, currentLanguage, translate } from "./words.js";

const link = document.querySelector("#link");
const LINK_WORDS = { connecting: "linkConnecting", live: "linkLive", lost: "linkLost", key: "linkKey" };

function showLink(state = link.dataset.state) {
  setAttribute(link, "data-state", state);
  setText(document.querySelector("#link-words"), translate(LINK_WORDS[state]));
  if (state === "key") askForKey();
}

/** Offer what a key may do, which the server has named by its role and its id. */
function useCaller(role, id) {
  offerActions(role);
  seeOwn(role);
  offerBudgets(role);
  offerAccesses(role);
  if (id !== link.dataset.caller) useChatsOf(id);
  link.dataset.caller = id;
}

const language = document.querySelector("#language");
const theme = document.querySelector("#theme");
theme.value = globalThis.fairleadTheme.chosen;
theme.addEventListener("change", () => globalThis.fairleadTheme.choose(theme.value));
language.addEventListener("change", () => chooseLanguage(language.value));
document.addEventListener("languagechange", () => {
  showLink();
  redrawTotals();
  redrawFleet();
  redrawChat();
  redrawPages();
});

chooseFirstLanguage();
language.value = currentLanguage();
redrawTotals();
redrawChat();
showLink();
startPages();
server.follow({
  history: showHistory,
  snapshot(snapshot) {
    showTotals(snapshot);
    showFleet(snapshot);
    showModels(snapshot);
    showErrors(snapshot);
  },
}, showLink, useCaller);
