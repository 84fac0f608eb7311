//! Every kind of origin, with servers of other projects: index, register, serve and verify.
//!
//! Chunks are named by their content, so copies of one dataset in different stores are one set of chunks.

use fletch_origin::{Credentials, OriginConfig, OriginLimits, OriginUri, Origins, PutMode};
use fletch_testkit::servers::{self, RealServer};
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::fixture::Site;
use fletch_tests::require::{Need, have};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Secrets of the credentials files. They must not appear anywhere else.
const SECRETS: &[&str] = &["hunter2secret", "AKIAHUNTER2", "tokenhunter2", servers::AZURE_KEY];

/// A dataset of 30 MB: small files and one file of three slices.
fn content() -> BTreeMap<String, Vec<u8>> {
    let bytes = |seed: u64, len: usize| {
        let mut out = vec![0; len];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
        out
    };
    (0..200u64)
        .map(|i| (format!("d{}/file {i:03}#.bin", i % 5), bytes(i, 100_000 + 17 * i as usize)))
        .chain([("big.bin".to_owned(), bytes(1000, 9_000_000)), ("empty".to_owned(), Vec::new())])
        .collect()
}

/// The running stores, and the configuration of their origins.
struct Stores {
    _servers: Vec<RealServer>,
    dir: TempDir,
    config: String,
    configs: Vec<OriginConfig>,
    /// The URI of a folder in each store, by the store's name. Each has its own prefix.
    places: BTreeMap<&'static str, String>,
    /// The folder that the plain file server serves.
    plain: PathBuf,
}

impl Stores {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn config(&self) -> &str {
        &self.config
    }
}

fn stores() -> Option<Stores> {
    let dir = TempDir::with_prefix("fletch-sources-").expect("scratch");
    let plain = dir.path().join("www");
    fs::create_dir(&plain).expect("mkdir");
    let s3 = servers::s3("bucket")?;
    let azure = servers::azure("container")?;
    let http = servers::files_with_ranges(&plain)?;
    let write = |name: &str, text: String| {
        let path = dir.path().join(name);
        fs::write(&path, text).expect("credentials");
        path
    };
    let aws = "[default]\naws_access_key_id = AKIAHUNTER2\naws_secret_access_key = hunter2secret\n";
    let files = [
        write("s3.credentials", aws.to_owned()),
        write("azure.credentials", format!("azure_storage_account_key = {}\n", servers::AZURE_KEY)),
        write("http.credentials", "token = tokenhunter2\n".to_owned()),
    ];
    let base = |prefix: &str, endpoint: Option<String>, file: &PathBuf| OriginConfig {
        prefix: prefix.to_owned(),
        endpoint,
        credentials: Some(Credentials::File(file.clone())),
        allow_http: true,
        ..OriginConfig::default()
    };
    let configs = vec![
        OriginConfig {
            region: Some("us-east-1".to_owned()),
            ..base("s3://bucket", Some(s3.endpoint()), &files[0])
        },
        OriginConfig {
            account: Some(servers::AZURE_ACCOUNT.to_owned()),
            ..base(
                "az://container",
                Some(format!("{}/{}", azure.endpoint(), servers::AZURE_ACCOUNT)),
                &files[1],
            )
        },
        base(&http.endpoint(), None, &files[2]),
    ];
    let text: String = configs.iter().map(table).collect();
    let config = write("fletch.toml", text).display().to_string();
    let places = BTreeMap::from([
        ("azure", "az://container/team b/copy".to_owned()),
        ("http", format!("{}/pub/data", http.endpoint())),
        ("local", dir.path().join("tree").display().to_string()),
        ("s3", "s3://bucket/team-a/sets/one".to_owned()),
    ]);
    Some(Stores { _servers: vec![s3, azure, http], dir, config, configs, places, plain })
}

fn table(c: &OriginConfig) -> String {
    let mut out = format!("[[origin]]\nprefix = \"{}\"\nallow_http = true\n", c.prefix);
    for (key, value) in [("endpoint", &c.endpoint), ("region", &c.region), ("account", &c.account)] {
        out += &value.as_ref().map_or(String::new(), |v| format!("{key} = \"{v}\"\n"));
    }
    if let Some(Credentials::File(path)) = &c.credentials {
        out += &format!("credentials = {{ file = \"{}\" }}\n", path.display());
    }
    out
}

/// Writes a dataset to a store.
fn fill(stores: &Stores, name: &str, files: &BTreeMap<String, Vec<u8>>) {
    let behind = match name {
        "local" => Some(PathBuf::from(&stores.places[name])),
        "http" => Some(stores.plain.join("pub/data")),
        _ => None,
    };
    if let Some(dir) = behind {
        for (path, bytes) in files {
            let at = dir.join(path);
            fs::create_dir_all(at.parent().expect("parent")).expect("mkdir");
            fs::write(at, bytes).expect("written");
        }
        return;
    }
    let rt = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let origins = Origins::new(stores.configs.clone(), OriginLimits::default()).expect("origins");
    let origin = origins.open(&OriginUri::parse(&stores.places[name]).expect("uri")).expect("open");
    rt.block_on(async {
        for (path, bytes) in files {
            origin.put(path, bytes.clone().into(), PutMode::Overwrite).await.expect(path);
        }
    });
}

/// Indexes a dataset in a store. Returns the root and the folder of its tables.
fn index(stores: &Stores, name: &str, files: &BTreeMap<String, Vec<u8>>) -> (String, PathBuf) {
    let to = stores.path(&format!("tables-{name}"));
    let list = stores.path("list");
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    fs::write(&list, names.join("\n")).expect("list");
    let mut c = command("fletch");
    c.args(["index", &stores.places[name], "--config", stores.config()]).arg("--to").arg(&to);
    c.arg("--state-dir").arg(stores.path("state"));
    if name == "http" {
        c.arg("--list").arg(&list);
    }
    let out = run(&mut c);
    no_secret(name, &out.stdout);
    no_secret(name, &out.stderr);
    (stdout(&out), to)
}

#[track_caller]
fn no_secret(what: &str, bytes: &[u8]) {
    for secret in SECRETS {
        let found = bytes.windows(secret.len()).any(|w| w == secret.as_bytes());
        assert!(!found, "{secret} stands in {what}");
    }
}

/// Checks that no file below a directory contains a secret.
fn no_secret_below(dir: &Path) {
    for file in fletch_tests::fixture::files(dir) {
        no_secret(&file.display().to_string(), &fs::read(dir.join(&file)).expect("read"));
    }
}

/// Fetches a file of a version with curl.
fn file(site: &Site, root: &str, path: &str) -> Vec<u8> {
    site.get(&format!("/v1/versions/{root}/files/{}", path.replace(' ', "%20").replace('#', "%23")))
}

#[test]
fn every_source_is_indexed_registered_served_and_verified() {
    let Some(stores) = stores() else { return };
    let files = content();
    let site = Site::start(&["--config", stores.config(), "--io-timeout", "20s"]);
    let mut roots = Vec::new();
    for name in stores.places.keys() {
        fill(&stores, name, &files);
        let (root, to) = index(&stores, name, &files);
        site.register(name, &stores.places[name], &to.display().to_string());
        let out = run(command("fletch").arg("verify").arg(&to).args(["--config", stores.config()]));
        no_secret("verify", &out.stderr);
        roots.push((name, root));
        no_secret_below(&to);
    }
    assert_eq!(roots.len(), 4, "sources that were tried");
    assert!(roots.iter().all(|(_, root)| *root == roots[0].1), "one root: {roots:?}");
    for (path, bytes) in files.iter().filter(|(path, _)| path.ends_with("7#.bin") || !path.contains('#')) {
        assert!(file(&site, &roots[0].1, path) == *bytes, "{path}");
    }
    no_secret("the log", site.log().as_bytes());
    no_secret("the metrics", &site.get("/metrics"));
    no_secret("the datasets", &site.get("/v1/datasets"));
    no_secret_below(&site.place("state"));
}

#[test]
fn copies_in_three_stores_are_one_set_of_chunks_and_are_fetched_once() {
    let Some(stores) = stores() else { return };
    let site = Site::start(&["--config", stores.config(), "--memory", "256MiB", "--io-timeout", "20s"]);
    let mut versions = Vec::new();
    let all = content();
    let data: usize = all.values().map(Vec::len).sum();
    // Each user's copy has a small file of its own, so that no two are one version.
    for name in ["s3", "azure", "local"] {
        let mut files = all.clone();
        files.insert(format!("README of {name}"), name.as_bytes().to_vec());
        fill(&stores, name, &files);
        let (root, to) = index(&stores, name, &files);
        site.register(name, &stores.places[name], &to.display().to_string());
        versions.push((name, root, files));
    }
    let mut roots: Vec<&String> = versions.iter().map(|(_, root, _)| root).collect();
    roots.dedup();
    assert_eq!(roots.len(), 3, "three versions");
    let before = site.metric("fletch_origin_read_bytes_total");
    for (name, root, files) in &versions {
        for (path, bytes) in files {
            assert!(file(&site, root, path) == *bytes, "{name}: {path}");
        }
        let read = (site.metric("fletch_origin_read_bytes_total") - before) / data as f64;
        eprintln!("{name}: {read:.4} of the data were read from stores so far");
        assert!((0.99..=1.01).contains(&read), "{name}: {read:.4} of the data were read from stores");
    }
}

#[test]
fn a_tar_shard_is_a_file_in_the_mount_and_its_members_are_not_in_the_tree() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let dir = TempDir::with_prefix("fletch-shards-").expect("scratch");
    let (members, tree) = (dir.path().join("members"), dir.path().join("tree"));
    for dir in [&members, &tree] {
        fs::create_dir(dir).expect("mkdir");
    }
    for (path, bytes) in content().into_iter().filter(|(path, _)| path.starts_with("d0/")) {
        fs::write(members.join(path.trim_start_matches("d0/")), bytes).expect("written");
    }
    let shard = tree.join("shard-0.tar");
    run(std::process::Command::new("tar").arg("-C").arg(&members).arg("-cf").arg(&shard).arg("."));
    let site = Site::start(&[]);
    let root = site.publish("shards", &tree);
    let bytes = fs::read(&shard).expect("read");
    assert!(bytes.len() > 4_000_000, "several chunks: {}", bytes.len());
    let m = site.mount("shards", "shards", &[]);
    assert_eq!(fletch_tests::fixture::files(&m.dir), [PathBuf::from("shard-0.tar")]);
    assert!(fs::read(m.dir.join("shard-0.tar")).expect("read") == bytes);
    m.stop();
    assert!(file(&site, &root, "shard-0.tar") == bytes);
}
