// The chats of this browser, and the settings of the chat. Chats are kept apart by the key that asked.

const MOST = 50;
const MOST_CHARS = 2_000_000;
const NAME = "fairlead-chats";
const SETTINGS = "fairlead-chat-settings";
let owner = "";

const read = (name, otherwise) => {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch { // storage can be disabled, or have something else
    return otherwise;
  }
};

const write = (name, value) => {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch { // it is full or disabled
    return false;
  }
};

const place = () => `${NAME} ${owner}`;

/** Use the chats of a key, named by its id; "": of clients without one. */
export function useOwner(id) {
  owner = id;
}

/** Return the kept chats, the latest first: `{id, title, model, messages}`. */
export function chats() {
  const found = read(place(), []);
  return Array.isArray(found) ? found.filter((chat) => Array.isArray(chat?.messages)) : [];
}

/** Keep a chat; drop the oldest ones if there are too many. Pictures and files are not part of it. */
export function keep(chat) {
  let kept = [chat, ...chats().filter(({ id }) => id !== chat.id)].slice(0, MOST);
  while (kept.length > 1 && JSON.stringify(kept).length > MOST_CHARS) kept.pop();
  while (kept.length && !write(place(), kept)) kept = kept.slice(0, -1);
}

/** Forget a chat. */
export function forget(wanted) {
  write(place(), chats().filter(({ id }) => id !== wanted));
}

/** Return the settings: `{system, temperature, limit}`, texts; "": the server's default. */
export function settings() {
  const { system = "", temperature = "", limit = "" } = read(SETTINGS, {});
  return { system: String(system), temperature: String(temperature), limit: String(limit) };
}

/** Keep the settings. */
export function keepSettings(value) {
  write(SETTINGS, value);
}
