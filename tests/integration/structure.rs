//! The shape of the project: dependency direction, purity of core, rooms of the server.

use fletch_tests::bins::repo;
use fletch_tests::structure::{edges, impurities, sources, wrong_edges, wrong_rooms};
use std::process::Command;

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

#[test]
fn core_is_pure() {
    let mut files = sources(&repo().join("crates/core/src"));
    files.retain(|f| !f.ends_with("tests.rs"));
    assert!(files.len() > 8);
    let faults: Vec<String> = files
        .iter()
        .flat_map(|f| impurities(&f.display().to_string(), &std::fs::read_to_string(f).expect("source")))
        .collect();
    assert_eq!(faults, Vec::<String>::new());
}

#[test]
fn a_clock_in_core_is_noticed() {
    assert_eq!(impurities("x.rs", "fn f() { let now = std::time::Instant::now(); }").len(), 2);
    assert_eq!(impurities("x.rs", "// std::fs is not for us\nfn f() {}").len(), 0);
}

#[test]
fn rooms_of_the_server_look_one_way() {
    let src = repo().join("cache-server/src");
    let mut faults = Vec::new();
    for f in sources(&src) {
        if f.ends_with("tests.rs") {
            continue;
        }
        let rel = f.strip_prefix(&src).expect("below").display().to_string();
        let room = rel.split('/').next().expect("a name").trim_end_matches(".rs").to_owned();
        faults.extend(wrong_rooms(&room, &rel, &std::fs::read_to_string(&f).expect("source")));
    }
    assert_eq!(faults, Vec::<String>::new());
}

#[test]
fn a_look_the_other_way_is_noticed() {
    assert_eq!(wrong_rooms("state", "state/mod.rs", "use crate::jobs::Registry;").len(), 1);
    assert_eq!(wrong_rooms("jobs", "jobs/mod.rs", "fn f() { crate::http::x() }").len(), 1);
    assert_eq!(
        wrong_rooms("http", "http/mod.rs", "use crate::jobs::Registry;\nuse crate::config::C;").len(),
        0
    );
}
