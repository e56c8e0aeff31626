// Conversations, kept in this browser: one item of localStorage each, apart for every API key.
// A conversation is {id, title, updated, turns}; a turn {question, asked, answer, reasoning, blend, error, stopped, full}: asked
// has the request's fields without the messages, full the answer of a full prefill.

const PREFIX = "cacheblend.conversation";
let space = "open";

export function useSpace(name) {
  space = name;
}

// Without a digest of the key nothing outlives the tab, since another key could be used next.
const storage = () => (space === "" ? sessionStorage : localStorage);
const nameOf = (id) => `${PREFIX}.${space}.${id}`;

export function create() {
  return { id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`, title: "", updated: 0, turns: [] };
}

/** All that are kept, the latest first. */
export function all() {
  const found = [];
  for (let i = 0; i < storage().length; i++) {
    const name = storage().key(i);
    if (!name.startsWith(nameOf(""))) continue;
    try {
      found.push(JSON.parse(storage().getItem(name)));
    } catch {
      storage().removeItem(name);
    }
  }
  return found.sort((a, b) => b.updated - a.updated);
}

/** Keep a conversation. The oldest others are deleted where the browser has no room. Returns whether it is kept. */
export function save(conversation) {
  conversation.updated = Date.now();
  conversation.title ||= (conversation.turns[0]?.question ?? "").slice(0, 80);
  const others = all().filter((other) => other.id !== conversation.id);
  for (;;) {
    try {
      storage().setItem(nameOf(conversation.id), JSON.stringify(conversation));
      return true;
    } catch {
      if (!others.length) return false;
      remove(others.pop().id);
    }
  }
}

export function remove(id) {
  storage().removeItem(nameOf(id));
}

export function removeAll() {
  for (const { id } of all()) remove(id);
}

/** Call back when another tab has changed them. */
export function whenChanged(handler) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) handler();
  });
}
