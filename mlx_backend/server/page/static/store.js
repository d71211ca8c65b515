// The chats, kept in this browser alone: in its IndexedDB, the newest of them, within bounds of number and bytes.
export const MAX_CHATS = 200, MAX_BYTES = 64 * 1024 * 1024;

let opened = null;

function database() {
  opened ||= new Promise((resolve) => {
    try {
      const request = indexedDB.open("mlx-backend", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch { resolve(null); }
  });
  return opened;
}

async function run(mode, work) {
  const store = (await database())?.transaction("chats", mode).objectStore("chats");
  if (!store) return null;
  return new Promise((resolve, reject) => {
    const request = work(store);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** All chats, the newest first. */
export async function loadChats() {
  const chats = (await run("readonly", (store) => store.getAll())) || [];
  return chats.sort((one, other) => other.updated - one.updated);
}

/** Keep a chat. `bytes` is how large it is written. */
export async function saveChat(chat) {
  const kept = structuredClone({ ...chat, bytes: 0 });
  kept.bytes = chat.bytes = JSON.stringify(kept).length;
  try {
    return Boolean(await run("readwrite", (store) => store.put(kept)));
  } catch { return false; } // the disk is full
}

export async function deleteChat(id) {
  await run("readwrite", (store) => store.delete(id));
}

/** Those of the chats, the newest first, for which there is no room. */
export function beyondBounds(chats) {
  let total = 0;
  return chats.filter((chat, index) => (total += chat.bytes || 0) > MAX_BYTES && index > 0 || index >= MAX_CHATS);
}

/** The chats of this browser, the newest first. */
export const chats = Object.assign(new EventTarget(), {
  list: [], isFull: false, removed: new Set(), // a reply that is still coming must not bring its chat back

  async load() {
    this.list = await loadChats();
    this.dispatchEvent(new Event("change"));
  },

  async save(chat) {
    if (this.removed.has(chat.id)) return;
    this.list = [chat, ...this.list.filter((each) => each !== chat)].sort((one, other) => other.updated - one.updated);
    this.isFull = !(await saveChat(chat));
    for (const old of beyondBounds(this.list)) await this.remove(old.id);
    this.dispatchEvent(new Event("change"));
  },

  async remove(id) {
    this.removed.add(id);
    this.list = this.list.filter((each) => each.id !== id);
    await deleteChat(id);
    this.dispatchEvent(new Event("change"));
  },
});
