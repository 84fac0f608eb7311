// Chooses the view by the address, keeps the stream of events, and asks for a token where one is needed.

import { listen, token } from "./access.js";
import { datasetView } from "./dataset.js";
import { h } from "./dom.js";
import { jobView } from "./job.js";
import { overview } from "./overview.js";
import { runbookView } from "./runbook.js";

const RETRY_MS_MAX = 15000;
const ROWS_MORE = 2000;

const main = document.getElementById("main");
const live = document.getElementById("live");
const forget = document.getElementById("forget");
const first = overview();
let now,
    view,
    stream,
    timer,
    rows = 100,
    retryMs = 1000;

function say(text, kind) {
    // A screen reader hears a change only.
    if (live.textContent !== text) {
        live.textContent = text;
    }
    live.className = kind;
}

const ROUTES = [
    [/^#\/jobs\/([^/]+)$/, (id) => jobView(id)],
    [/^#\/datasets\/([^/]+)\/([^/]+)$/, (domain, name) => datasetView(domain, name)],
    [/^#\/runbooks\/([A-Za-z]+)$/, (name) => runbookView(name)],
];

function decoded(texts) {
    try {
        return texts.map(decodeURIComponent);
    } catch {
        return [];
    }
}

function choose() {
    clearTimeout(timer);
    const route = ROUTES.map(([form, make]) => [form.exec(location.hash), make]).find(([found]) => found);
    view = route ? route[1](...decoded(route[0].slice(1))) : first;
    const back = route && h("p", null, h("a", { href: "#/" }, "← Overview"));
    main.replaceChildren(...(back ? [back] : []), view.root);
    if (route) {
        scrollTo(0, 0);
        refresh(view);
    }
    main.focus({ preventScroll: true });
}

async function refresh(shown) {
    try {
        await shown.refresh(() => now);
        shown.root.querySelector(".failed")?.remove();
    } catch (e) {
        const words = `${e.message}${e.hint ? `. ${e.hint}` : ""}`;
        const old = shown.root.querySelector(".failed");
        const failed = h("p", { class: "failed bad-text", role: "alert" }, words);
        old ? old.replaceWith(failed) : shown.root.prepend(failed);
    }
    if (shown === view && shown.every > 0) {
        clearTimeout(timer);
        timer = setTimeout(() => refresh(shown), document.hidden ? 10 * shown.every : shown.every);
    }
}

function onEvent(name, data) {
    if (name === "history") {
        first.history(data);
    } else if (name === "now") {
        const isFirst = !now;
        now = data;
        retryMs = 1000;
        document.getElementById("server").textContent =
            `${now.server.version} at ${now.server.url}` +
            (now.server.is_admin ? "" : ` · domain ${now.server.domain}`);
        say("live", "good");
        first.update(now);
        if (isFirst && view !== first) {
            clearTimeout(timer);
            refresh(view);
        }
    }
}

async function keepListening() {
    stream?.abort();
    const own = (stream = new AbortController());
    forget.hidden = !token.get();
    while (!own.signal.aborted) {
        try {
            await listen(`/v1/dashboard/events?rows=${rows}`, onEvent, own.signal);
            say("the server ended the connection; connecting again …", "warning");
        } catch (e) {
            if (own.signal.aborted) {
                return;
            }
            if (e.status === 401 || e.status === 403) {
                askForToken(e);
                return;
            }
            say(
                e.status ? `${e.message}. ${e.hint}` : "the server does not answer; the numbers are old",
                "critical",
            );
        }
        await new Promise((done) => setTimeout(done, retryMs));
        retryMs = Math.min(2 * retryMs, RETRY_MS_MAX);
    }
}

function askForToken(refusal) {
    clearTimeout(timer);
    say("the server needs a token", "warning");
    const had = token.get();
    token.forget();
    forget.hidden = true;
    const field = h("input", {
        type: "password",
        id: "token",
        autocomplete: "off",
        required: true,
        spellcheck: "false",
    });
    const form = h(
        "form",
        { class: "token" },
        h("h1", null, "Token"),
        had && h("p", { class: "bad-text", role: "alert" }, `${refusal.message}. ${refusal.hint}`),
        h(
            "p",
            null,
            "The server shows its state to the holder of a token. The token stays in this tab until it closes.",
        ),
        h("label", { for: "token" }, "Token"),
        field,
        h("button", { type: "submit" }, "Show"),
    );
    form.onsubmit = (event) => {
        event.preventDefault();
        token.set(field.value.trim());
        // Nothing of another principal stays on the page.
        location.reload();
    };
    main.replaceChildren(form);
    field.focus();
}

forget.onclick = () => {
    stream?.abort();
    token.forget();
    location.reload();
};
addEventListener("hashchange", choose);
addEventListener("more", () => {
    rows = ROWS_MORE;
    keepListening();
});
choose();
keepListening();
