// Talks to the server this page came from. The token stays in this tab: in its session storage, and in the
// header of requests; it is in no URL.

const KEY = "fletch-token";

export const token = {
    get: () => sessionStorage.getItem(KEY),
    set: (value) => sessionStorage.setItem(KEY, value),
    forget: () => sessionStorage.removeItem(KEY),
};

/** An answer that is no success. `hint` says what to do. */
export class Refused extends Error {
    constructor(status, detail, hint) {
        super(detail);
        this.status = status;
        this.hint = hint;
    }
}

async function send(path, signal) {
    const held = token.get();
    const headers = held ? { Authorization: `Bearer ${held}` } : {};
    const response = await fetch(path, { headers, signal, cache: "no-store", redirect: "error" });
    if (!response.ok) {
        const problem = await response.json().catch(() => ({}));
        throw new Refused(response.status, problem.detail ?? `status ${response.status}`, problem.hint ?? "");
    }
    return response;
}

export async function read(path) {
    return (await send(path)).json();
}

export async function readText(path) {
    return (await send(path)).text();
}

/** Calls `on(name, data)` for each event of a stream, until it ends. */
export async function listen(path, on, signal) {
    const response = await send(path, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
        const { value, done } = await reader.read();
        if (done) {
            return;
        }
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
            const field = (name) =>
                event
                    .split("\n")
                    .filter((line) => line.startsWith(`${name}: `))
                    .map((line) => line.slice(name.length + 2))
                    .join("\n");
            on(field("event"), JSON.parse(field("data") || "null"));
        }
    }
}
