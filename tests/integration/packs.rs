//! The whole path of a pack: `fletch pack`, server, mount. The requests are counted at the origin.

use fletch_testkit::dataset::{Spec, Tree, write_tree};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use fletch_tests::bins::{command, run};
use fletch_tests::fixture::{Site, files};
use fletch_tests::require::{Need, have};
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// A tree of about 25 MB: small files with odd names, and one long file.
fn tree(dir: &Path, seed: u64) -> Tree {
    let spec = Spec { files: 700, median_bytes: 24 << 10, symlinks: 0, empty_dirs: 0, ..Spec::default() };
    let mut tree = write_tree(dir, seed, &spec).expect("tree");
    let long = fletch_testkit::dataset::content(seed, 1 << 40, 9_500_000);
    fs::write(dir.join("long.bin"), &long).expect("write");
    // A key with a line break is one that no store takes through `object_store`.
    let odd = |p: &String| p.contains('\n');
    for (path, size) in tree.files.iter().filter(|(p, _)| odd(p)) {
        fs::remove_file(dir.join(path)).expect("remove");
        tree.bytes -= size;
    }
    tree.files.retain(|(p, _)| !odd(p));
    tree.files.push(("long.bin".into(), long.len() as u64));
    tree.bytes += long.len() as u64;
    tree
}

/// Runs `fletch pack` on a URI. Returns its report.
fn pack(site: &Site, uri: &str, to: &str, more: &[&str]) -> Value {
    let mut c = command("fletch");
    c.args(["pack", uri, "--to", to, "--json", "--state-dir"]).arg(site.place("state-pack")).args(more);
    serde_json::from_slice(&run(&mut c).stdout).expect("json")
}

/// Checks that the mount shows the tree, byte by byte.
fn same(tree: &Path, mount: &Path) {
    let names = files(tree);
    let shown: Vec<_> = files(mount);
    assert_eq!(shown, names);
    for name in names {
        let (want, got) = (fs::read(tree.join(&name)).expect("file"), fs::read(mount.join(&name)));
        assert!(got.unwrap_or_else(|e| panic!("{}: {e}", name.display())) == want, "{}", name.display());
    }
}

#[test]
fn a_pack_in_a_bucket_costs_one_request_a_chunk() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-packs-").expect("tree");
    let tree = tree(data.path(), 31);
    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    for (path, _) in &tree.files {
        origin.insert(&format!("set/{path}"), fs::read(data.path().join(path)).expect("file"));
    }
    let config = data.path().with_extension("toml");
    let text = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\ncredentials = \"anonymous\"\n\
         region = \"local\"\n",
        origin.uri(),
        origin.endpoint()
    );
    fs::write(&config, text).expect("config");
    let config = config.to_str().expect("UTF-8");
    let site = Site::start(&["--memory", "256MiB", "--config", config]);
    let (set, to) = (format!("{}/set", origin.uri()), format!("{}/packs", origin.uri()));
    let report = pack(&site, &set, &to, &["--config", config]);
    let chunks = report["chunks_written"].as_u64().expect("number");
    assert!(chunks >= 3, "{report}");
    site.register("packed", &set, &to);
    let m = site.mount("packed", "packs", &["--memory", "64MiB"]);
    origin.reset_counts();
    same(data.path(), &m.dir);
    let counts = origin.counts();
    let of = |prefix: &str| -> u64 {
        counts.gets.iter().filter(|(k, _)| k.starts_with(prefix)).map(|(_, n)| n).sum()
    };
    assert_eq!(of("packs/fletch/chunks/"), chunks, "one request a chunk");
    assert_eq!(of("set/"), 3, "the slices of the long file: {:?}", counts.gets);
    let fetched = site.metric("fletch_chunk_fetched_bytes_total") as u64;
    let written = report["chunk_bytes_written"].as_u64().expect("number");
    assert_eq!(fetched, written + 9_500_000);
    m.stop();
    fs::remove_file(config).expect("remove");
}

#[test]
fn a_local_pack_is_the_tree_and_serves_files_and_batches() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-packs-").expect("tree");
    let tree = tree(data.path(), 32);
    let site = Site::start(&[]);
    let to = site.place("packs").display().to_string();
    let uri = data.path().display().to_string();
    let report = pack(&site, &uri, &to, &[]);
    site.register("packed", &uri, &to);
    let m = site.mount("packed", "local", &[]);
    same(data.path(), &m.dir);
    // The sources are not needed once they are packed: a server that has nothing reads chunks.
    let fresh = Site::start(&[]);
    for (path, _) in tree.files.iter().filter(|(p, _)| p != "long.bin") {
        fs::remove_file(data.path().join(path)).expect("remove");
    }
    fresh.register("packed", &uri, &to);
    let root = report["root"].as_str().expect("root");
    let (path, size) = tree
        .files
        .iter()
        .find(|(p, n)| *n > 9000 && p.is_ascii() && !p.contains(['%', '?', '#', ' ']))
        .expect("file");
    let bytes = fresh.get(&format!("/v1/versions/{root}/files/{path}"));
    assert_eq!(bytes.len() as u64, *size);
    assert!(bytes == fs::read(m.dir.join(path)).expect("mounted"));
    m.stop();
}
