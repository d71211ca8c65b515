// A page that is opened from a folder may start no worker: the search's runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      const answer = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      this.ready = new Promise((loaded) => {
        inside.postMessage = answer;
        inside.importScripts = () => undefined;
        const script = inside.document.createElement("script");
        script.src = new URL(url, document.baseURI).href;
        script.onload = loaded;
        inside.document.documentElement.append(script);
      });
    }
    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
