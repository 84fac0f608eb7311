//! What every origin promises, over a directory and over an S3-style server.

mod contract;
mod faults;
mod local;

use fletch_origin::{Credentials, Origin, OriginConfig, OriginLimits, OriginUri, Origins};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use futures::TryStreamExt as _;
use std::time::Duration;

fn limits(io_timeout_ms: u64) -> OriginLimits {
    OriginLimits { io_timeout: Duration::from_millis(io_timeout_ms), ..OriginLimits::default() }
}

fn config(emulator: &OriginEmulator) -> OriginConfig {
    OriginConfig {
        prefix: emulator.uri(),
        endpoint: Some(emulator.endpoint()),
        credentials: Some(Credentials::Anonymous),
        allow_http: true,
        ..OriginConfig::default()
    }
}

fn origins(emulator: &OriginEmulator, limits: OriginLimits) -> Origins {
    Origins::new(vec![config(emulator)], limits).expect("a right configuration")
}

fn uri(text: &str) -> OriginUri {
    OriginUri::parse(text).expect("a URI")
}

/// An origin of each kind, empty.
struct Places {
    all: Vec<(&'static str, Origin)>,
    _emulators: Vec<OriginEmulator>,
    _dirs: Vec<tempfile::TempDir>,
}

fn places() -> Places {
    let dirs: Vec<_> = (0..2).map(|_| tempfile::tempdir().expect("tempdir")).collect();
    let local = Origins::new(vec![], limits(20_000)).expect("no configuration");
    let local = local.open(&OriginUri::local(dirs[0].path()).expect("a path")).expect("open");
    let mut all = vec![("local", local)];
    let mut emulators = Vec::new();
    for (name, backing, below) in [
        ("s3", Backing::empty(), "/base/a b"),
        ("s3 over files", Backing::Directory(dirs[1].path().to_owned()), ""),
    ] {
        let emulator = OriginEmulator::start(EmulatorConfig::default(), backing);
        let at = uri(&format!("{}{below}", emulator.uri()));
        all.push((name, origins(&emulator, limits(20_000)).open(&at).expect("open")));
        emulators.push(emulator);
    }
    Places { all, _emulators: emulators, _dirs: dirs }
}

async fn names(origin: &Origin, prefix: &str) -> Vec<String> {
    origin.list(prefix).map_ok(|meta| meta.path).try_collect().await.expect("a listing")
}
