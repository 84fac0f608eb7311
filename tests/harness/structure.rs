//! The shape of the project as rules: which package may use which, which room of the server
//! may name which, and what the pure core may never name. Each rule is a function over text,
//! so that a test can show it fail.

use std::path::{Path, PathBuf};

/// Package → packages of this workspace it may depend on (not counting dev-dependencies).
pub const PACKAGES: &[(&str, &[&str])] = &[
    ("fletch-core", &[]),
    ("fletch-api", &["fletch-core"]),
    ("fletch-tables", &["fletch-core"]),
    ("fletch-settings", &["fletch-core"]),
    ("fletch-origin", &["fletch-core"]),
    ("fletch-store", &["fletch-core"]),
    ("fletch-client", &["fletch-core", "fletch-api", "fletch-tables", "fletch-origin"]),
    ("fletch-testkit", &["fletch-core"]),
    ("fletch-sim", &["fletch-core"]),
    (
        "fletch-server",
        &["fletch-core", "fletch-api", "fletch-tables", "fletch-settings", "fletch-origin", "fletch-store"],
    ),
    (
        "fletch-mount",
        &[
            "fletch-core",
            "fletch-api",
            "fletch-tables",
            "fletch-settings",
            "fletch-store",
            "fletch-client",
            "fletch-origin",
        ],
    ),
    ("fletch-python", &["fletch-core", "fletch-api", "fletch-tables", "fletch-client"]),
    (
        "fletch",
        &[
            "fletch-core",
            "fletch-api",
            "fletch-tables",
            "fletch-settings",
            "fletch-origin",
            "fletch-client",
            "fletch-sim",
        ],
    ),
];

/// Packages outside the rule: they test and measure, and nothing depends on them.
pub const LEAVES: &[&str] = &["fletch-tests", "fletch-benches"];

/// Crates that only one package may name.
pub const SOLE_USERS: &[(&str, &str)] = &[
    ("object_store", "fletch-origin"),
    ("sled", "fletch-store"),
    ("fuser", "fletch-mount"),
    ("pyo3", "fletch-python"),
    ("moka", "fletch-store fletch-tables fletch-server fletch-mount"),
    ("prometheus", "fletch-server fletch-mount"),
];

/// Rooms of the server → rooms they may name ([`SERVER_OPEN`] is open to all; `app` owns
/// everything and nobody names it but `main`).
pub const SERVER_ROOMS: &[(&str, &[&str])] = &[
    ("http", &["server", "auth", "jobs", "state", "versions", "warmups"]),
    ("server", &["auth", "jobs", "state", "versions", "warmups"]),
    ("versions", &["state"]),
    ("warmups", &["versions"]),
    ("auth", &[]),
    ("jobs", &["versions"]),
    ("state", &[]),
];

/// Rooms of the server that any room may name.
pub const SERVER_OPEN: &[&str] = &["config", "limits", "cgroup", "metrics", "telemetry"];

/// What the pure core may not name: clock, threads, IO, environment, OS randomness.
pub const CORE_BANS: &[&str] = &[
    "std::time::Instant",
    "std::time::SystemTime",
    "Instant::now",
    "SystemTime::now",
    "std::fs",
    "std::net",
    "std::thread",
    "std::env",
    "std::process",
    "std::io",
    "tokio",
    "rand::",
    "getrandom",
    "RandomState",
    "HashMap",
    "HashSet",
];

/// Dependencies between packages, from `cargo metadata --no-deps`: (package, dependency).
///
/// # Errors
/// When the text is no such metadata.
pub fn edges(metadata: &serde_json::Value) -> Result<Vec<(String, String)>, String> {
    let text = |v: &serde_json::Value| v.as_str().map(str::to_owned).ok_or("a name");
    let mut out = Vec::new();
    for p in metadata["packages"].as_array().ok_or("packages")? {
        for d in p["dependencies"].as_array().ok_or("dependencies")? {
            if d["kind"].as_str() != Some("dev") {
                out.push((text(&p["name"])?, text(&d["name"])?));
            }
        }
    }
    Ok(out)
}

/// Edges that break [`PACKAGES`] or [`SOLE_USERS`].
#[must_use]
pub fn wrong_edges(edges: &[(String, String)]) -> Vec<String> {
    let mut out = Vec::new();
    let ours = |name: &str| PACKAGES.iter().any(|(p, _)| *p == name) || LEAVES.contains(&name);
    for (from, to) in edges {
        if LEAVES.contains(&from.as_str()) {
            continue;
        }
        let Some((_, allowed)) = PACKAGES.iter().find(|(p, _)| p == from) else {
            out.push(format!("{from} is in no rule: give it a room"));
            continue;
        };
        if ours(to) && !allowed.contains(&to.as_str()) {
            out.push(format!("{from} may not depend on {to}"));
        }
        if let Some((_, users)) = SOLE_USERS.iter().find(|(c, _)| c == to)
            && !users.split(' ').any(|u| u == from)
        {
            out.push(format!("{from} may not use {to}: that is for {users}"));
        }
    }
    out
}

/// Source lines without comments and without what follows `#[cfg(test)]`.
fn code(source: &str) -> impl Iterator<Item = (usize, &str)> {
    source
        .lines()
        .enumerate()
        .take_while(|(_, l)| !l.contains("#[cfg(test)]"))
        .map(|(i, l)| (i + 1, l.split("//").next().unwrap_or("")))
}

/// Names in a core source that core may not name.
#[must_use]
pub fn impurities(file: &str, source: &str) -> Vec<String> {
    code(source)
        .flat_map(|(n, l)| {
            CORE_BANS
                .iter()
                .filter(|b| l.contains(*b))
                .map(move |b| format!("{file}:{n}: core may not name {b}"))
        })
        .collect()
}

/// Names of other rooms in a server source that its room may not name.
#[must_use]
pub fn wrong_rooms(room: &str, file: &str, source: &str) -> Vec<String> {
    if matches!(room, "app" | "main" | "lib") || SERVER_OPEN.contains(&room) {
        return Vec::new();
    }
    let allowed = SERVER_ROOMS.iter().find(|(r, _)| *r == room).map_or(&[][..], |(_, a)| *a);
    let mut out = Vec::new();
    for (n, l) in code(source) {
        for at in l.match_indices("crate::").map(|(i, m)| i + m.len()) {
            let named: String = l[at..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let is_room = named.chars().next().is_some_and(char::is_lowercase);
            if is_room
                && named != room
                && !allowed.contains(&named.as_str())
                && !SERVER_OPEN.contains(&named.as_str())
            {
                out.push(format!("{file}:{n}: room {room} may not name room {named}"));
            }
        }
    }
    out
}

/// All Rust sources below a directory, in order.
///
/// # Panics
/// When the directory cannot be read.
#[must_use]
pub fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(d) = todo.pop() {
        for e in std::fs::read_dir(&d).unwrap_or_else(|e| panic!("{}: {e}", d.display())) {
            let path = e.expect("entry").path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|x| x == "rs") {
                out.push(path);
            }
        }
    }
    out.sort();
    out
}
