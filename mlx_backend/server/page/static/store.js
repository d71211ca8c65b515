// The chats, kept in this browser alone: in its IndexedDB, the newest of them, within bounds of number and bytes.
export const MAX_CHATS = 200, MAX_BYTES = 64 * 1024 * 1024;

const database = new Promise((resolve) => {
  try {
    const request = indexedDB.open("mlx-backend", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  } catch { resolve(null); } // a browser that keeps nothing
});

async function run(mode, work) {
  const store = (await database)?.transaction("chats", mode).objectStore("chats");
  if (!store) return null;
  return new Promise((resolve, reject) => {
    const request = work(store);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const newestFirst = (one, other) => other.updated - one.updated;

/** The chats of this browser, the newest first. `bytes` of one is how large it is written. */
export const chats = Object.assign(new EventTarget(), {
  list: [], isFull: false, removed: new Set(), // a reply that is still coming must not bring its chat back

  async load() {
    this.list = ((await run("readonly", (store) => store.getAll())) || []).sort(newestFirst);
    this.dispatchEvent(new Event("change"));
  },

  async save(chat) {
    if (this.removed.has(chat.id)) return;
    this.list = [chat, ...this.list.filter((each) => each !== chat)].sort(newestFirst);
    const kept = structuredClone({ ...chat, bytes: 0 });
    kept.bytes = chat.bytes = JSON.stringify(kept).length;
    this.isFull = !(await run("readwrite", (store) => store.put(kept)).catch(() => null)); // the disk is full
    let total = 0;
    const beyond = this.list.filter((each, index) => (total += each.bytes || 0) > MAX_BYTES && index > 0 || index >= MAX_CHATS);
    for (const old of beyond) await this.remove(old.id);
    this.dispatchEvent(new Event("change"));
  },

  async remove(id) {
    this.removed.add(id);
    this.list = this.list.filter((each) => each.id !== id);
    await run("readwrite", (store) => store.delete(id));
    this.dispatchEvent(new Event("change"));
  },
});
