//! The rules of the tree's shape: which package may use which package, which room of a crate may use
//! which room, and what the pure core may never name.
//!
//! A *room* is a top-level module of a crate. Sources are parsed with `syn`, so that a rule sees every
//! form of a name: `use crate::{a, b}`, nested groups, `self` and `super`, paths inside expressions and
//! types, and paths inside the arguments of a macro. Code below `#[cfg(test)]` is outside the rules.
//!
//! Every rule is a function over text, so that a test can plant a violation and see it reported.

use proc_macro2::{Span, TokenStream, TokenTree};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};
use syn::{
    Attribute, Ident, ImplItemFn, Item, ItemMod, ItemUse, Macro, UseTree, Visibility,
    visit::{self, Visit},
};

/// Each package, with the packages of this workspace that it may depend on (dev-dependencies apart).
pub const PACKAGES: &[(&str, &[&str])] = &[
    ("fletch-core", &[]),
    ("fletch-api", &["fletch-core"]),
    ("fletch-tables", &["fletch-core"]),
    ("fletch-settings", &["fletch-core"]),
    ("fletch-host", &[]),
    ("fletch-bounds", &[]),
    ("fletch-origin", &["fletch-core", "fletch-host", "fletch-bounds"]),
    ("fletch-store", &["fletch-core", "fletch-bounds"]),
    ("fletch-window", &[]),
    (
        "fletch-client",
        &["fletch-core", "fletch-api", "fletch-host", "fletch-tables", "fletch-origin", "fletch-window"],
    ),
    (
        "fletch-indexer",
        &[
            "fletch-core",
            "fletch-api",
            "fletch-tables",
            "fletch-settings",
            "fletch-host",
            "fletch-origin",
            "fletch-client",
        ],
    ),
    ("fletch-testkit", &["fletch-core"]),
    ("fletch-sim", &["fletch-core"]),
    (
        "fletch-server",
        &[
            "fletch-core",
            "fletch-api",
            "fletch-tables",
            "fletch-settings",
            "fletch-host",
            "fletch-origin",
            "fletch-store",
            "fletch-bounds",
            "fletch-window",
            // For the TLS of what a server asks other servers.
            "fletch-client",
            // To seal drafts.
            "fletch-indexer",
        ],
    ),
    (
        "fletch-mount",
        &[
            "fletch-core",
            "fletch-api",
            "fletch-tables",
            "fletch-settings",
            "fletch-host",
            "fletch-store",
            "fletch-client",
            "fletch-origin",
        ],
    ),
    ("fletch-python", &["fletch-core", "fletch-api", "fletch-tables", "fletch-client"]),
    ("fletch-manuals", &["fletch", "fletch-mount", "fletch-server"]),
    (
        "fletch",
        &[
            "fletch-core",
            "fletch-api",
            "fletch-tables",
            "fletch-settings",
            "fletch-host",
            "fletch-origin",
            "fletch-client",
            "fletch-indexer",
            "fletch-sim",
        ],
    ),
];

/// Packages that test and measure. They may depend on any package, and no package depends on them.
pub const LEAVES: &[&str] = &["fletch-tests", "fletch-fuzz", "fletch-benches"];

/// Third-party crates that only the named packages may use.
pub const SOLE_USERS: &[(&str, &str)] = &[
    ("object_store", "fletch-origin"),
    ("sled", "fletch-store"),
    ("memmap2", "fletch-window fletch-mount"),
    ("fuser", "fletch-benches"),
    ("pyo3", "fletch-python"),
    ("moka", "fletch-store fletch-tables fletch-server fletch-mount"),
    ("prometheus", "fletch-server fletch-mount"),
];

/// The rooms of the server, from the top down, whatever folder they lie in ([`SERVER_FOLDERS`]). A room may
/// use the rooms of the lines below its own, and no room of its own line.
pub const SERVER_LAYERS: &[&[&str]] = &[
    &["fuzzing"],
    &["app"],
    &["s3"],
    &["http"],
    &["overview"],
    &["metrics"],
    &["server"],
    &["groups"],
    &["jobs", "warmups", "drafts", "mounts"],
    &["epochs"],
    &["sweep", "prefetch"],
    &["reads"],
    &["chunk_reads"],
    &["versions"],
    &["tenants", "credentials", "catalog", "learned"],
    &["config"],
    &["accounting", "state", "auth", "connections", "cluster", "tls"],
    &["limits", "telemetry", "read_ahead", "request_metrics", "idle", "benefit", "allocation", "dashboard"],
];

/// The folders of the server's sources, each with its rooms. A folder may be a room itself, too: `app` and
/// `cluster` are.
pub const SERVER_FOLDERS: &[(&str, &[&str])] = &[
    ("app", &["config", "idle", "limits", "request_metrics", "server", "telemetry", "tls"]),
    ("admin", &["dashboard", "metrics", "overview"]),
    ("training", &["allocation", "benefit", "epochs", "jobs", "prefetch", "sweep"]),
    ("data", &["chunk_reads", "drafts", "learned", "read_ahead", "reads", "versions", "warmups"]),
    ("cluster", &["catalog", "groups"]),
    ("tenancy", &["accounting", "auth", "connections", "credentials", "mounts", "state", "tenants"]),
];

/// The most top-level modules of the server.
pub const SERVER_DOORS_MAX: usize = 9;

/// The folders of the core that have an order among themselves, each with the folders it may use.
pub const CORE_FOLDERS: &[(&str, &[&str])] = &[
    ("plan", &[]),
    ("residency", &["plan"]),
    ("delivery", &["plan"]),
    ("order", &["plan", "residency", "delivery"]),
    ("prefetch", &["plan", "residency", "order"]),
];

/// The rooms of the core that every room of the core may use. They use no folder of [`CORE_FOLDERS`].
pub const CORE_BASE: &[&str] = &[
    "benefit", "capacity", "cluster", "error", "groups", "hash", "manifest", "names", "record", "varint",
    "verified",
];

/// What the pure core may not name: clocks, threads, IO, the environment, randomness of the system, and
/// maps whose order differs between runs. A single name is banned as any part of a path.
pub const CORE_BANS: &[&str] = &[
    "std::fs",
    "std::net",
    "std::thread",
    "std::env",
    "std::process",
    "std::io",
    "tokio",
    "rand",
    "getrandom",
    "Instant",
    "SystemTime",
    "RandomState",
    "HashMap",
    "HashSet",
];

/// The files of `fuse-client/src` that run in a keeper while it holds mounts ([ADR 97]). Of the modules that
/// it shares with other processes it also uses single functions, of 110 lines together: `fuse::resend`,
/// `unmount::detach`, `fusermount::unmount`, `directory::mount_links`, `mount::raise_read_ahead`,
/// `request_memory::requests_in`, `mounts::at`, and numbers and headers of `fuse_wire`.
///
/// [ADR 97]: ../../docs/adr/0097-a-keeper-does-what-no-worker-can.md
pub const KEEPER_FILES: &[&str] = &[
    "keeper/child.rs",
    "keeper/event_loop.rs",
    "keeper/file_pages.rs",
    "keeper/kept_mount.rs",
    "keeper/listener.rs",
    "keeper/messages.rs",
    "keeper/mod.rs",
    "keeper/mount_set.rs",
    "keeper/watch.rs",
    "keeper/worker_memory.rs",
    "kernel_mount.rs",
    "passed_device.rs",
];

/// The most lines of code in [`KEEPER_FILES`].
pub const KEEPER_LINES_MAX: usize = 1040;

/// Returns the dependencies that `cargo metadata --no-deps` reports, as (package, dependency).
///
/// # Errors
/// When a field of the metadata is missing.
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

/// Returns the dependencies that break [`PACKAGES`] or [`SOLE_USERS`].
#[must_use]
pub fn wrong_edges(edges: &[(String, String)]) -> Vec<String> {
    let mut out = Vec::new();
    let ours = |name: &str| PACKAGES.iter().any(|(p, _)| *p == name) || LEAVES.contains(&name);
    for (from, to) in edges {
        if LEAVES.contains(&from.as_str()) {
            continue;
        }
        let Some((_, allowed)) = PACKAGES.iter().find(|(p, _)| p == from) else {
            out.push(format!("{from} is in no rule: add it to PACKAGES in tests/harness/structure.rs"));
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

/// A name in a source: the path from the crate's root (first segment `crate`) or as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// Line in the source, from 1.
    pub line: usize,
    /// Segments. A glob ends in `*`.
    pub path: Vec<String>,
}

/// Returns the module path of a file of a crate: `jobs/epoch/mod.rs` is `["jobs", "epoch"]`.
#[must_use]
pub fn module_of(file: &str) -> Vec<String> {
    let mut path: Vec<String> = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if path.last().is_some_and(|l| matches!(l.as_str(), "mod" | "lib" | "main")) {
        path.pop();
    }
    path
}

/// Returns a module path without the folder of [`SERVER_FOLDERS`] in which its room lies.
fn in_room(path: &[String]) -> &[String] {
    let [folder, room, ..] = path else { return path };
    let lies_there = |(name, rooms): &(&str, &[&str])| name == folder && rooms.contains(&room.as_str());
    if SERVER_FOLDERS.iter().any(lies_there) { &path[1..] } else { path }
}

/// Returns every name in a source outside its tests.
///
/// `file` is the path below `src`: relative names (`self`, `super`) depend on it.
///
/// # Errors
/// When the source is not Rust.
pub fn names(file: &str, source: &str) -> Result<Vec<Name>, String> {
    let parsed = syn::parse_file(source).map_err(|e| format!("{file}: {e}"))?;
    let mut found = Names { module: module_of(file), names: Vec::new() };
    found.visit_file(&parsed);
    Ok(found.names)
}

struct Names {
    module: Vec<String>,
    names: Vec<Name>,
}

impl Names {
    /// Records a path. `self` and `super` become a path from the crate's root.
    fn record(&mut self, span: Span, written: &[String]) {
        let relative = written.iter().take_while(|s| matches!(s.as_str(), "self" | "super")).count();
        let path = if relative == 0 {
            written.to_vec()
        } else {
            let up = written[..relative].iter().filter(|s| *s == "super").count();
            let base = &self.module[..self.module.len().saturating_sub(up)];
            [&["crate".to_owned()][..], base, &written[relative..]].concat()
        };
        self.names.push(Name { line: span.start().line, path });
    }

    fn record_use(&mut self, tree: &UseTree, prefix: &[String]) {
        let with = |i: &Ident| [prefix, &[i.to_string()]].concat();
        match tree {
            UseTree::Path(p) => self.record_use(&p.tree, &with(&p.ident)),
            UseTree::Name(n) if n.ident == "self" => self.record(n.ident.span(), prefix),
            UseTree::Name(n) => self.record(n.ident.span(), &with(&n.ident)),
            UseTree::Rename(r) if r.ident == "self" => self.record(r.ident.span(), prefix),
            UseTree::Rename(r) => self.record(r.ident.span(), &with(&r.ident)),
            UseTree::Glob(g) => self.record(g.star_token.spans[0], &[prefix, &["*".to_owned()]].concat()),
            UseTree::Group(g) => g.items.iter().for_each(|t| self.record_use(t, prefix)),
        }
    }

    /// Records the paths among the tokens of a macro's arguments.
    fn record_tokens(&mut self, tokens: TokenStream) {
        let mut path: Option<(Span, Vec<String>)> = None;
        let mut colons = 0;
        for t in tokens {
            match t {
                TokenTree::Ident(i) => match &mut path {
                    Some((_, p)) if colons == 2 => p.push(i.to_string()),
                    _ => {
                        if let Some((span, p)) = path.replace((i.span(), vec![i.to_string()])) {
                            self.record(span, &p);
                        }
                    }
                },
                TokenTree::Punct(p) if p.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Group(g) => self.record_tokens(g.stream()),
                TokenTree::Punct(_) | TokenTree::Literal(_) => {
                    if let Some((span, p)) = path.take() {
                        self.record(span, &p);
                    }
                }
            }
            colons = 0;
        }
        if let Some((span, p)) = path {
            self.record(span, &p);
        }
    }
}

impl<'a> Visit<'a> for Names {
    fn visit_item(&mut self, item: &'a Item) {
        let attributes: &[Attribute] = match item {
            Item::Const(i) => &i.attrs,
            Item::Enum(i) => &i.attrs,
            Item::Fn(i) => &i.attrs,
            Item::Impl(i) => &i.attrs,
            Item::Macro(i) => &i.attrs,
            Item::Mod(i) => &i.attrs,
            Item::Static(i) => &i.attrs,
            Item::Struct(i) => &i.attrs,
            Item::Trait(i) => &i.attrs,
            Item::Type(i) => &i.attrs,
            Item::Use(i) => &i.attrs,
            _ => &[],
        };
        if !for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, f: &'a ImplItemFn) {
        if !for_tests(&f.attrs) {
            visit::visit_impl_item_fn(self, f);
        }
    }

    fn visit_item_mod(&mut self, m: &'a ItemMod) {
        self.module.push(m.ident.to_string());
        visit::visit_item_mod(self, m);
        self.module.pop();
    }

    fn visit_item_use(&mut self, u: &'a ItemUse) {
        self.record_use(&u.tree, &[]);
    }

    fn visit_path(&mut self, p: &'a syn::Path) {
        let written: Vec<String> = p.segments.iter().map(|s| s.ident.to_string()).collect();
        if let Some(first) = p.segments.first() {
            self.record(first.ident.span(), &written);
        }
        visit::visit_path(self, p);
    }

    fn visit_macro(&mut self, m: &'a Macro) {
        self.visit_path(&m.path);
        self.record_tokens(m.tokens.clone());
    }

    /// `pub(in crate::jobs)` uses nothing.
    fn visit_visibility(&mut self, _: &'a Visibility) {}
}

fn for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|a| {
        a.path().is_ident("cfg")
            && a.parse_args::<syn::Path>().is_ok_and(|condition| condition.is_ident("test"))
    })
}

/// Returns the names in a source of the core that [`CORE_BANS`] forbids.
///
/// # Errors
/// When the source is not Rust.
pub fn impurities(file: &str, source: &str) -> Result<Vec<String>, String> {
    let mut out = Vec::new();
    for name in names(file, source)? {
        let path: Vec<&str> = name.path.iter().map(String::as_str).collect();
        for ban in CORE_BANS {
            let banned: Vec<&str> = ban.split("::").collect();
            let whole = path.first() == Some(&"std") && (path.len() == 1 || path[1] == "*");
            let type_name = ban.starts_with(char::is_uppercase) && path.contains(ban);
            if type_name || path.starts_with(&banned) {
                out.push(format!("{file}:{}: core may not name {ban}", name.line));
            } else if whole && banned[0] == "std" {
                out.push(format!("{file}:{}: core may not name all of std", name.line));
                break;
            }
        }
    }
    Ok(out)
}

/// The rooms of one crate, and the names that its root re-exports from them.
#[derive(Debug, Clone, Default)]
pub struct Rooms {
    /// Rooms, as `lib.rs` declares them.
    pub declared: BTreeSet<String>,
    /// Name at the root, with the room it comes from.
    reexported: BTreeMap<String, String>,
}

impl Rooms {
    /// Reads a crate's `lib.rs`.
    ///
    /// # Errors
    /// When the source is not Rust.
    pub fn parse(lib: &str) -> Result<Self, String> {
        let mut out = Rooms::default();
        for item in syn::parse_file(lib).map_err(|e| format!("lib.rs: {e}"))?.items {
            match item {
                Item::Mod(m) if !for_tests(&m.attrs) => {
                    out.declared.insert(m.ident.to_string());
                }
                Item::Use(u) => {
                    let mut used = Names { module: Vec::new(), names: Vec::new() };
                    used.record_use(&u.tree, &[]);
                    for mut n in used.names {
                        n.path.retain(|s| !matches!(s.as_str(), "crate" | "self"));
                        if let (Some(room), Some(name)) = (in_room(&n.path).first(), n.path.last()) {
                            out.reexported.insert(name.clone(), room.clone());
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(out)
    }

    /// Adds the rooms of a folder of [`SERVER_FOLDERS`], by the modules that its head declares.
    ///
    /// # Errors
    /// When the source is not Rust.
    pub fn add_folder(&mut self, folder: &str, head: &str) -> Result<(), String> {
        let rules = server_rules();
        if !rules.contains_key(folder) {
            self.declared.remove(folder);
        }
        let is_own = |module: &String| !rules.contains_key(folder) || rules.contains_key(module.as_str());
        self.declared.extend(Rooms::parse(head)?.declared.into_iter().filter(is_own));
        Ok(())
    }
}

/// Each room with the rooms it may use.
pub type Rules = BTreeMap<&'static str, BTreeSet<&'static str>>;

/// Returns the rules of the server: [`SERVER_LAYERS`].
#[must_use]
pub fn server_rules() -> Rules {
    let below = |i: usize| SERVER_LAYERS[i + 1..].iter().flat_map(|l| l.iter().copied()).collect();
    let rows = SERVER_LAYERS.iter().enumerate();
    rows.flat_map(|(i, layer)| layer.iter().map(move |room| (*room, below(i)))).collect()
}

/// Returns the rules of the core: [`CORE_FOLDERS`] over [`CORE_BASE`].
#[must_use]
pub fn core_rules() -> Rules {
    let folders = CORE_FOLDERS.iter().map(|(f, uses)| (*f, uses.iter().chain(CORE_BASE).copied().collect()));
    folders.chain(CORE_BASE.iter().map(|b| (*b, CORE_BASE.iter().copied().collect()))).collect()
}

/// Returns the rooms that a crate declares and no rule lists, and those that a rule lists and no crate has.
#[must_use]
pub fn unlisted(rules: &Rules, rooms: &Rooms) -> Vec<String> {
    let declared = rooms.declared.iter().map(String::as_str);
    let new = declared.filter(|r| !rules.contains_key(r)).map(|r| format!("room {r} is in no rule: list it"));
    let gone = rules.keys().filter(|r| !rooms.declared.contains(**r));
    new.chain(gone.map(|r| format!("room {r} is listed and does not exist"))).collect()
}

/// Returns the names in a source that its room may not use. `file` is the path below `src`.
///
/// # Errors
/// When the source is not Rust.
pub fn wrong_uses(rules: &Rules, rooms: &Rooms, file: &str, source: &str) -> Result<Vec<String>, String> {
    let module = module_of(file);
    let Some(room) = in_room(&module).first() else { return Ok(Vec::new()) };
    if SERVER_FOLDERS.iter().any(|(folder, _)| module == [*folder]) && !rules.contains_key(room.as_str()) {
        // The head of a folder declares its rooms.
        return Ok(Vec::new());
    }
    let Some(allowed) = rules.get(room.as_str()) else {
        return Ok(vec![format!("{file}:1: room {room} is in no rule: list it")]);
    };
    let mut out = Vec::new();
    for name in names(file, source)? {
        let Some((root, path)) = name.path.split_first() else { continue };
        let (true, Some(used)) = (root == "crate", in_room(path).first()) else { continue };
        let used = rooms.reexported.get(used).unwrap_or(used);
        if used != room && !allowed.contains(used.as_str()) {
            out.push(format!("{file}:{}: room {room} may not use {used}", name.line));
        }
    }
    Ok(out)
}

/// Returns how many lines of a file are code: not blank, no comment, and before its tests.
#[must_use]
pub fn code_lines(source: &str) -> usize {
    let is_code = |line: &&str| !line.is_empty() && !line.starts_with("//");
    source.lines().map(str::trim).take_while(|line| *line != "#[cfg(test)]").filter(is_code).count()
}

/// Returns all Rust sources below a directory except those of tests (`tests.rs`, `tests/`), in order.
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
            if path.file_stem().is_some_and(|n| n == "tests") {
                continue;
            }
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
