// Numbers and states for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(n) {
    if (n === undefined || n === null) {
        return "–";
    }
    let unit = 0;
    while (n >= 1024 && unit < UNITS.length - 1) {
        n /= 1024;
        unit += 1;
    }
    return `${unit === 0 ? n : n.toFixed(n < 10 ? 2 : 1)} ${UNITS[unit]}`;
}

export function count(n) {
    return n === undefined || n === null ? "–" : Math.round(n).toLocaleString("en-US");
}

export function plural(n, what) {
    return `${count(n)} ${what}${n === 1 ? "" : "s"}`;
}

export function rate(n) {
    return n === undefined || n === null ? "–" : n < 10 ? n.toFixed(1) : count(n);
}

export function percent(part) {
    if (part === undefined || part === null || Number.isNaN(part)) {
        return "–";
    }
    const whole = part * 100;
    // Nothing that is missing reads as complete.
    const text = whole > 0 && whole < 1 ? whole.toFixed(1) : String(Math.floor(whole + 1e-9));
    return `${text} %`;
}

export function part(n, whole) {
    return whole > 0 ? Math.min(1, n / whole) : 0;
}

export function duration(seconds) {
    if (seconds === undefined || seconds === null) {
        return "–";
    }
    if (seconds < 1) {
        return seconds <= 0 ? "0 s" : "< 1 s";
    }
    const units = [
        ["d", 86400],
        ["h", 3600],
        ["min", 60],
        ["s", 1],
    ];
    const first = units.findIndex(([, length]) => seconds >= length);
    const [name, length] = units[first];
    const whole = Math.floor(seconds / length);
    const next = units[first + 1];
    const rest = next && whole < 10 ? Math.floor((seconds - whole * length) / next[1]) : 0;
    return rest > 0 ? `${whole} ${name} ${rest} ${next[0]}` : `${whole} ${name}`;
}

/** How long ago a time of the server was, by the server's own clock. */
export function ago(ns, nowNs) {
    return duration(Math.max(0, (nowNs - ns) / 1e9));
}

export function time(ns) {
    return ns ? new Date(ns / 1e6).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "–";
}

/** What a job does, in one line: the server's own words, which `fletch jobs show` prints, too. */
export function doing(job) {
    return job.words;
}

/** The part of a job's bytes with each result, with the classes of its bar. */
export function split(job) {
    const sums = [
        ["hit", "cache", job.hit_bytes],
        ["substituted", "cache, chosen for it", job.substituted_bytes],
        ["miss", "origin", job.miss_bytes],
        ["bypass", "origin, not kept", job.bypass_bytes],
    ];
    const all = sums.reduce((sum, [, , n]) => sum + n, 0);
    return { all, parts: sums.map(([kind, words, n]) => ({ kind, words, n, part: part(n, all) })) };
}
