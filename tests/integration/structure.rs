//! The shape of the tree: the direction of dependencies, the purity of the core, the rooms of the server.

use fletch_tests::bins::repo;
use fletch_tests::structure::{
    CORE_BASE, CORE_FOLDERS, KEEPER_FILES, KEEPER_LINES_MAX, PACKAGES, Rooms, Rules, SERVER_DOORS_MAX,
    SERVER_FOLDERS, SERVER_LAYERS, code_lines, core_rules, edges, impurities, names, server_rules, sources,
    unlisted, wrong_edges, wrong_uses,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

fn metadata() -> serde_json::Value {
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(repo())
        .output()
        .expect("cargo metadata");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("json")
}

#[test]
fn packages_depend_in_one_direction() {
    let edges = edges(&metadata()).expect("metadata");
    assert!(edges.len() > 50, "too few edges to be true: {}", edges.len());
    assert_eq!(wrong_edges(&edges), Vec::<String>::new());
}

#[test]
fn a_wrong_edge_is_noticed() {
    let edge = |a: &str, b: &str| wrong_edges(&[(a.to_owned(), b.to_owned())]).len();
    assert_eq!(edge("fletch-store", "fletch-server"), 1);
    assert_eq!(edge("fletch-core", "fletch-api"), 1);
    assert_eq!(edge("fletch-api", "fletch-origin"), 1);
    assert_eq!(edge("fletch-server", "object_store"), 1);
    assert_eq!(edge("fletch-new", "serde"), 1);
    assert_eq!(edge("fletch-server", "fletch-store"), 0);
}

/// Returns every violation of the rules in the sources below `src`.
fn violations(src: &str, rules: &Rules) -> Vec<String> {
    let src = repo().join(src);
    let mut rooms = Rooms::parse(&fs::read_to_string(src.join("lib.rs")).expect("lib.rs")).expect("Rust");
    if src.ends_with("cache-server/src") {
        for (folder, _) in SERVER_FOLDERS {
            let heads = [src.join(folder).join("mod.rs"), src.join(format!("{folder}.rs"))];
            let head = heads.iter().find_map(|head| fs::read_to_string(head).ok()).expect("a head");
            rooms.add_folder(folder, &head).expect("Rust");
        }
    }
    let mut out = unlisted(rules, &rooms);
    for f in sources(&src) {
        let file = f.strip_prefix(&src).expect("below").display().to_string();
        let text = fs::read_to_string(&f).expect("source");
        out.extend(wrong_uses(rules, &rooms, &file, &text).unwrap_or_else(|e| vec![e]));
    }
    out
}

fn none(offences: &[String]) {
    assert!(offences.is_empty(), "{} offences\n{}", offences.len(), offences.join("\n"));
}

#[test]
fn core_is_pure() {
    let src = repo().join("crates/core/src");
    let files = sources(&src);
    assert!(files.len() > 8);
    let mut faults = Vec::new();
    for f in files {
        let file = f.strip_prefix(&src).expect("below").display().to_string();
        let text = fs::read_to_string(&f).expect("source");
        faults.extend(impurities(&file, &text).unwrap_or_else(|e| vec![e]));
    }
    none(&faults);
}

#[test]
fn a_clock_in_core_is_noticed() {
    let found = |source: &str| impurities("x.rs", source).expect("Rust").len();
    assert_eq!(found("fn f() { let now = std::time::Instant::now(); }"), 1);
    assert_eq!(found("use std::{fmt, time::{Duration, Instant as Now}};"), 1);
    assert_eq!(found("use std::{collections::{BTreeMap, HashMap}, io::{self, Read}};"), 3);
    assert_eq!(found("use std as s;"), 1);
    assert_eq!(found("use std::*;"), 1);
    assert_eq!(found("fn f() { println!(\"{:?}\", std::env::args()) }"), 1);
    assert_eq!(found("fn f(x: tokio::task::JoinHandle<()>) {}"), 1);
    assert_eq!(found("use rand::Rng;"), 1);
    assert_eq!(found("use rand_chacha::ChaCha8Rng;"), 0);
    assert_eq!(found("// std::fs is not for us\nfn f() {}"), 0);
    assert_eq!(found("#[cfg(test)]\nmod tests { use std::fs; }\nfn f() {}"), 0);
}

#[test]
fn folders_of_core_look_one_way() {
    none(&violations("crates/core/src", &core_rules()));
}

#[test]
fn rooms_of_the_server_look_one_way() {
    none(&violations("cache-server/src", &server_rules()));
}

#[test]
fn the_server_has_few_doors_and_each_map_of_it_is_right() {
    let lib = fs::read_to_string(repo().join("cache-server/src/lib.rs")).expect("lib.rs");
    let doors = Rooms::parse(&lib).expect("Rust").declared;
    assert!(doors.len() <= SERVER_DOORS_MAX, "{doors:?}");
    let map = fs::read_to_string(repo().join("docs/ARCHITECTURE.md")).expect("read");
    for door in &doors {
        assert!(lib.contains(&format!("//! {door:<11}")), "the head of lib.rs does not name {door}");
    }
    for (folder, rooms) in SERVER_FOLDERS {
        let head = [format!("{folder}/mod.rs"), format!("{folder}.rs")];
        let head = head.iter().find_map(|f| fs::read_to_string(repo().join("cache-server/src").join(f)).ok());
        let head = head.expect("a head");
        for room in *rooms {
            assert!(head.contains(&format!("`{room}`")), "the head of {folder} does not name {room}");
        }
    }
    // The drawing of the rooms has the lines of the rule, in its order.
    let drawing = map.split_once("The rooms, from the top down").expect("the drawing").1;
    let drawing = drawing.split("```").nth(1).expect("a block");
    let lines = drawing.lines().skip(1).filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()));
    let drawn: Vec<BTreeSet<&str>> = lines
        .map(|line| line.split("  ").next().expect("rooms").split(' ').filter(|w| !w.is_empty()).collect())
        .collect();
    let ruled: Vec<BTreeSet<&str>> = SERVER_LAYERS.iter().map(|l| l.iter().copied().collect()).collect();
    assert_eq!(drawn, ruled);
}

#[test]
fn the_map_of_the_packages_is_right() {
    let text = fs::read_to_string(repo().join("docs/ARCHITECTURE.md")).expect("read");
    let folder_of = |package: &str| match package {
        "fletch-server" => "cache-server".to_owned(),
        "fletch-mount" => "fuse-client".to_owned(),
        "fletch" => "dataset-tools".to_owned(),
        _ => package.trim_start_matches("fletch-").to_owned(),
    };
    let mut drawn: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines().filter(|line| line.contains("─▶ ") && line.ends_with("core")) {
        let (from, to) = line.split_once('─').expect("an arrow");
        let to = to.trim_start_matches(['─', '▶', ' ']).replace(" (with the feature `fallback`)", "");
        for package in from.trim().split(", ") {
            drawn.insert(package.to_owned(), to.split(", ").map(str::to_owned).collect());
        }
    }
    let ruled: BTreeMap<String, BTreeSet<String>> = PACKAGES
        .iter()
        .filter(|(name, uses)| uses.contains(&"fletch-core") && *name != "fletch-testkit")
        .map(|(name, uses)| (folder_of(name), uses.iter().map(|used| folder_of(used)).collect()))
        .collect();
    assert_eq!(drawn, ruled);
}

#[test]
fn a_room_in_a_folder_keeps_its_rules() {
    let lib: String = SERVER_LAYERS.concat().iter().map(|r| format!("mod {r};")).collect();
    let rooms = Rooms::parse(&lib).expect("Rust");
    let found = |file, source| wrong_uses(&server_rules(), &rooms, file, source).expect("Rust").len();
    assert_eq!(found("data/versions/x.rs", "use crate::training::sweep::X;"), 1);
    assert_eq!(found("data/versions/x.rs", "use crate::{app::limits::X, tenancy::tenants::Y};"), 0);
    assert_eq!(found("training/sweep/x.rs", "use super::super::super::data::versions::X;"), 0);
    assert_eq!(found("app/limits.rs", "use crate::app::server::Server;"), 1);
}

/// Plants a use of every room in every room, in every form, and compares with `allowed`.
fn plant(rules: &Rules, all: &[&str], allowed: impl Fn(&str, &str) -> bool) {
    let lib: String =
        all.iter().map(|r| format!("mod {r};\npub use {r}::{}Root;\n", r.to_uppercase())).collect();
    let rooms = Rooms::parse(&lib).expect("Rust");
    assert_eq!(unlisted(rules, &rooms), Vec::<String>::new());
    for from in all {
        let file = format!("{from}/a/b.rs");
        for to in all {
            let root = to.to_uppercase();
            for source in [
                format!("use crate::{to}::X;"),
                format!("use crate::{{{from}::Y, {to}::{{X, y::{{self, Z}}}}}};")
                    .replace("y::{self, Z}", "X2"),
                format!("use super::super::super::{to} as other;"),
                format!("use crate::{root}Root;"),
                format!("fn f() -> u8 {{ crate::{to}::x() }}"),
                format!("fn f() -> Vec<crate::{to}::X> {{ Vec::new() }}"),
                format!("fn f() {{ assert!(true, \"{{}}\", crate::{to}::x()) }}"),
                format!("mod inner {{ use super::super::super::super::{to}::X; }}"),
                format!("impl crate::{to}::Trait for Y {{}}"),
            ] {
                let found = wrong_uses(rules, &rooms, &file, &source).expect("Rust");
                assert_eq!(found.is_empty(), from == to || allowed(from, to), "{file}: {source}: {found:?}");
            }
        }
    }
}

#[test]
fn a_look_the_other_way_is_noticed() {
    let layer = |room: &str| SERVER_LAYERS.iter().position(|l| l.contains(&room)).expect("listed");
    plant(&server_rules(), &SERVER_LAYERS.concat(), |from, to| layer(from) < layer(to));
}

#[test]
fn a_folder_of_core_that_looks_the_other_way_is_noticed() {
    let folders: Vec<&str> = CORE_FOLDERS.iter().map(|(f, _)| *f).collect();
    plant(&core_rules(), &[&folders[..], CORE_BASE].concat(), |from, to| {
        CORE_BASE.contains(&to) || CORE_FOLDERS.iter().any(|(f, uses)| *f == from && uses.contains(&to))
    });
}

#[test]
fn a_room_that_no_rule_lists_is_noticed() {
    let listed: String = SERVER_LAYERS.concat().iter().map(|r| format!("mod {r};")).collect();
    let with_new = Rooms::parse(&format!("{listed} mod fresh;")).expect("Rust");
    assert_eq!(unlisted(&server_rules(), &with_new), ["room fresh is in no rule: list it"]);
    let found = wrong_uses(&server_rules(), &with_new, "fresh/mod.rs", "fn f() {}").expect("Rust");
    assert_eq!(found, ["fresh/mod.rs:1: room fresh is in no rule: list it"]);
    let without = Rooms::parse(&listed.replace("mod sweep;", "")).expect("Rust");
    assert_eq!(unlisted(&server_rules(), &without), ["room sweep is listed and does not exist"]);
}

#[test]
fn files_of_the_python_package_look_one_way() {
    let uses_of = |path: &std::path::PathBuf| {
        let file = path.file_name().expect("a file").to_string_lossy().into_owned();
        let names = names(&file, &fs::read_to_string(path).expect("source")).expect("Rust");
        let used = names.into_iter().filter(|n| n.path.first().is_some_and(|root| root == "crate"));
        let module = file.trim_end_matches(".rs").to_owned();
        let used = used.filter_map(|n| n.path.get(1).cloned()).filter(|m| *m != module);
        (module.clone(), used.collect::<BTreeSet<String>>())
    };
    let mut left: BTreeMap<_, _> = sources(&repo().join("python/src")).iter().map(uses_of).collect();
    assert!(left.len() > 8 && left["client"].contains("version"), "{left:?}");
    // Take away the files that use none of the others. What is left uses each other in a circle.
    while let Some(free) =
        left.iter().find(|(_, used)| !used.iter().any(|m| left.contains_key(m))).map(|(m, _)| m.clone())
    {
        left.remove(&free);
    }
    assert!(left.is_empty(), "a circle of files: {left:?}");
}

#[test]
fn a_room_is_listed_once() {
    let listed = SERVER_LAYERS.concat();
    assert_eq!(listed.iter().collect::<BTreeSet<_>>().len(), listed.len(), "{listed:?}");
}

#[test]
fn names_are_found_with_their_line() {
    let source =
        "use super::{\n    a::B,\n    c,\n};\npub(in crate::x) fn f() {}\n#[cfg(test)]\nuse crate::t;\n";
    let found = names("one/two.rs", source).expect("Rust");
    let found: Vec<(usize, String)> = found.into_iter().map(|n| (n.line, n.path.join("::"))).collect();
    assert_eq!(found, [(2, "crate::one::a::B".to_owned()), (3, "crate::one::c".to_owned())]);
    assert!(names("x.rs", "fn {").is_err());
}

/// A client that follows redirects, or takes a proxy from the environment, connects to unconfigured places.
#[test]
fn every_http_client_follows_no_redirect_and_reads_no_environment() {
    let (mut clients, mut faults) = (0, Vec::new());
    for src in ["crates", "cache-server/src", "fuse-client/src", "dataset-tools/src", "python/src"] {
        for file in sources(&repo().join(src)) {
            let shown = file.strip_prefix(repo()).expect("below").display().to_string();
            if shown.contains("/tests/") || shown.contains("testkit") || shown.ends_with("/tests.rs") {
                continue;
            }
            let text = fs::read_to_string(&file).expect("source");
            let made = text.matches("reqwest::Client::builder()").count();
            let chained = text.matches("Policy::none()").count().min(text.matches(".no_proxy()").count());
            clients += made;
            if made > chained {
                faults.push(format!("{shown}: a client without Policy::none() or no_proxy()"));
            }
            for short in
                ["reqwest::Client::new()", "reqwest::get(", "ClientBuilder::new()", "reqwest::blocking"]
            {
                if text.contains(short) {
                    faults.push(format!("{shown}: {short} follows redirects"));
                }
            }
        }
    }
    let known = "of servers, of origins, of Prometheus, of Kubernetes";
    assert_eq!((clients, faults), (4, Vec::<String>::new()), "{known}");
}

#[test]
fn a_keeper_is_small() {
    let src = repo().join("fuse-client/src");
    let lines = |file: &&str| code_lines(&fs::read_to_string(src.join(file)).expect("a file of the keeper"));
    let sum: usize = KEEPER_FILES.iter().map(lines).sum();
    assert!(sum <= KEEPER_LINES_MAX, "{sum} lines run in a keeper");
    let below = sources(&src.join("keeper")).into_iter().map(|file| file.file_name().map(ToOwned::to_owned));
    for file in below.flatten().filter(|file| file != "worker.rs") {
        let file = format!("keeper/{}", file.display());
        assert!(KEEPER_FILES.contains(&file.as_str()), "{file}: list it in KEEPER_FILES");
    }
    assert_eq!(code_lines("//! Head.\n\nfn f() {\n    // Why.\n}\n#[cfg(test)]\nmod tests {}"), 2);
}
