//! Runs one contract over every kind of origin: a directory, the emulator, and real servers.
//!
//! Asserts how many cases ran over each kind, so that no case is skipped unnoticed.

use crate::{contract, limits, origins, uri};
use bytes::Bytes;
use fletch_origin::{Credentials, Origin, OriginConfig, OriginUri, Origins, PutMode};
use fletch_testkit::{Api, Backing, EmulatorConfig, Manners, OriginEmulator, dataset, servers};
use futures::future::BoxFuture;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// An empty origin for one case.
pub struct TestOrigin {
    pub name: &'static str,
    pub origin: Origin,
    /// The directory to write to if the origin itself is read-only.
    behind: Option<PathBuf>,
    /// Whether the server sends etags.
    pub etags: bool,
    _held: Vec<TempDir>,
    _emulator: Option<OriginEmulator>,
}

impl TestOrigin {
    fn at(name: &'static str, origin: Origin) -> Self {
        TestOrigin { name, origin, behind: None, etags: true, _held: Vec::new(), _emulator: None }
    }

    /// Writes an object. At a read-only origin, writes the file that its server serves.
    pub async fn write(&self, path: &str, bytes: impl Into<Bytes>) {
        let bytes = bytes.into();
        let Some(dir) = &self.behind else {
            return self.origin.put(path, bytes, PutMode::Overwrite).await.expect(path);
        };
        let file = dir.join(path);
        // Plain servers send times in seconds, so each state of a file gets another second.
        let before = std::fs::metadata(&file).and_then(|m| m.modified());
        let time = before.map_or(SystemTime::now(), |t| t + Duration::from_secs(2));
        std::fs::create_dir_all(file.parent().expect("a parent")).expect(path);
        std::fs::write(&file, bytes).expect(path);
        std::fs::File::options().write(true).open(&file).expect(path).set_modified(time).expect(path);
    }

    /// Returns unusual names that this kind of origin supports.
    pub fn odd_names(&self) -> Vec<&'static str> {
        let names = dataset::ODD_NAMES.iter().copied();
        match self.name {
            "local" => names.collect(),
            // The library rejects control characters in keys. Azure treats `\` as `/`.
            "azure" => names.filter(|n| !n.contains(['\n', '\\'])).collect(),
            _ => names.filter(|n| !n.contains('\n')).collect(),
        }
    }

    pub async fn remove(&self, path: &str) {
        match &self.behind {
            None => self.origin.delete(path).await.expect(path),
            Some(dir) => std::fs::remove_file(dir.join(path)).expect(path),
        }
    }
}

/// The operations beside reading that a case needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Reads,
    WritesAndLists,
}

type Case = for<'a> fn(&'a TestOrigin) -> BoxFuture<'a, ()>;

macro_rules! cases {
    ($($needs:ident $case:ident,)*) => {
        &[$((stringify!($case), Needs::$needs, |target| Box::pin(contract::$case(target))),)*]
    };
}

const CASES: &[(&str, Needs, Case)] = cases![
    Reads reads_return_exactly_the_requested_bytes,
    Reads odd_names_are_read_as_they_are,
    Reads a_changed_object_is_distinguished_from_the_pinned_one,
    Reads paths_that_leave_the_origin_are_rejected_by_every_call,
    WritesAndLists create_happens_once_and_overwrite_replaces,
    WritesAndLists listings_are_complete_and_in_byte_order,
    WritesAndLists listings_of_several_pages_are_complete,
    WritesAndLists files_of_any_size_are_written_whole,
];

/// Runs the cases that this kind of origin supports, each in its own origin, and asserts that they are
/// `expected` many.
async fn run(name: &str, needs: &[Needs], expected: usize, mut target: impl FnMut(&str) -> TestOrigin) {
    let mut ran = Vec::new();
    for (case, needed, run) in CASES {
        if needs.contains(needed) {
            eprintln!("{name}: {case}");
            run(&target(case)).await;
            ran.push(case);
        }
    }
    assert_eq!(ran.len(), expected, "cases that ran over {name}: {ran:?}");
}

const ALL: &[Needs] = &[Needs::Reads, Needs::WritesAndLists];

#[tokio::test]
async fn contract_of_a_directory() {
    run("local", ALL, 8, |_| {
        let dir = tempfile::tempdir().expect("tempdir");
        let origins = Origins::new(vec![], limits(20_000)).expect("no configuration");
        let origin = origins.open(&OriginUri::local(dir.path()).expect("a path")).expect("open");
        TestOrigin { _held: vec![dir], ..TestOrigin::at("local", origin) }
    })
    .await;
}

#[tokio::test]
async fn contract_of_the_emulator() {
    // No GCS server of another project that takes writes of the XML API runs here.
    for (name, api, over_files, below) in [
        ("s3 emulator", Api::S3, false, "/base/a b"),
        ("s3 emulator over files", Api::S3, true, ""),
        ("gcs emulator", Api::Gcs, false, "/base/a b"),
    ] {
        run(name, ALL, 8, |_| {
            let dir = tempfile::tempdir().expect("tempdir");
            let backing =
                if over_files { Backing::Directory(dir.path().to_owned()) } else { Backing::empty() };
            let manners = Manners { api, ..Manners::default() };
            let config = EmulatorConfig { manners, ..EmulatorConfig::default() };
            let emulator = OriginEmulator::start(config, backing);
            let at = uri(&format!("{}{below}", emulator.uri()));
            let origin = origins(&emulator, limits(20_000)).open(&at).expect("open");
            TestOrigin { _held: vec![dir], _emulator: Some(emulator), ..TestOrigin::at(name, origin) }
        })
        .await;
    }
}

/// Returns the configuration of a container at a server that [`servers::azure`] started, and the directory
/// with its credentials.
fn azure(endpoint: &str, container: &str) -> (OriginConfig, TempDir) {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("azure");
    let text = format!("azure_storage_account_key = {}\n", servers::AZURE_KEY);
    std::fs::write(&file, text).expect("written");
    let config = OriginConfig {
        prefix: format!("az://{container}"),
        endpoint: Some(format!("{endpoint}/{}", servers::AZURE_ACCOUNT)),
        account: Some(servers::AZURE_ACCOUNT.to_owned()),
        credentials: Some(Credentials::File(file)),
        allow_http: true,
        ..OriginConfig::default()
    };
    (config, dir)
}

#[tokio::test]
async fn contract_of_a_real_s3_server() {
    let Some(server) = servers::s3("bucket") else { return };
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("credentials");
    std::fs::write(&file, "[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
        .expect("written");
    let config = OriginConfig {
        prefix: "s3://bucket".to_owned(),
        endpoint: Some(server.endpoint()),
        region: Some("us-east-1".to_owned()),
        credentials: Some(Credentials::File(file)),
        allow_http: true,
        ..OriginConfig::default()
    };
    let origins = Origins::new(vec![config], limits(60_000)).expect("right");
    run("s3", ALL, 8, |case| {
        TestOrigin::at("s3", origins.open(&uri(&format!("s3://bucket/{case}/a b"))).expect("open"))
    })
    .await;
}

#[tokio::test]
async fn contract_of_a_real_azure_server() {
    let Some(server) = servers::azure("container") else { return };
    let (config, _dir) = azure(&server.endpoint(), "container");
    let origins = Origins::new(vec![config], limits(60_000)).expect("right");
    run("azure", ALL, 8, |case| {
        TestOrigin::at("azure", origins.open(&uri(&format!("az://container/{case}/a b"))).expect("open"))
    })
    .await;
}

/// Runs the cases over a plain server of a directory's files.
async fn plain(name: &'static str, endpoint: &str, dir: &TempDir, etags: bool) {
    let config = OriginConfig { prefix: endpoint.to_owned(), allow_http: true, ..OriginConfig::default() };
    let origins = Origins::new(vec![config], limits(20_000)).expect("right");
    run(name, &[Needs::Reads], 4, |case| {
        let behind = dir.path().join(case).join("a b");
        std::fs::create_dir_all(&behind).expect("mkdir");
        let origin = origins.open(&uri(&format!("{endpoint}/{case}/a%20b"))).expect("open");
        TestOrigin { behind: Some(behind), etags, ..TestOrigin::at(name, origin) }
    })
    .await;
}

#[tokio::test]
async fn contract_of_a_plain_server_with_ranges() {
    let dir = tempfile::tempdir().expect("tempdir");
    let Some(server) = servers::files_with_ranges(dir.path()) else { return };
    plain("http", &server.endpoint(), &dir, true).await;
}

#[tokio::test]
async fn contract_of_a_plain_server_without_ranges() {
    let dir = tempfile::tempdir().expect("tempdir");
    let Some(server) = servers::files_without_ranges(dir.path()) else { return };
    plain("http without ranges", &server.endpoint(), &dir, false).await;
}
