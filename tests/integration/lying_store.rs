//! I1 with a store that answers wrongly, one test for each kind of fault.
//!
//! No wrong byte leaves the server. The reader gets the right bytes, or a clear error within its timeout.
//! Each case is counted in the metrics.

use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::fixture::Site;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

const IO_TIMEOUT: Duration = Duration::from_secs(3);

struct Lie {
    site: Site,
    emulator: OriginEmulator,
    root: String,
    small: Vec<u8>,
    large: Vec<u8>,
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// A bucket with a small file and a file of three slices, indexed and registered before the fault begins.
fn setup() -> Lie {
    let emulator = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    let (small, large) = (bytes(1, 100_000), bytes(2, 9_000_000));
    emulator.insert("set/small", small.clone());
    emulator.insert("set/large", large.clone());
    let dir = tempfile::tempdir().expect("tempdir");
    let config = dir.path().join("fletch.toml");
    let text = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nregion = \"x\"\nallow_http = true\n\
         credentials = \"anonymous\"\n",
        emulator.uri(),
        emulator.endpoint()
    );
    fs::write(&config, text).expect("config");
    let config = config.display().to_string();
    let seconds = format!("{}s", IO_TIMEOUT.as_secs());
    let site = Site::start(&["--config", &config, "--io-timeout", &seconds]);
    let (uri, to) = (format!("{}/set", emulator.uri()), site.place("tables"));
    let mut index = command("fletch");
    index.args(["index", &uri, "--config", &config]).arg("--to").arg(&to);
    let root = stdout(&run(index.arg("--state-dir").arg(site.place("index-state"))));
    site.register("set", &uri, &to.display().to_string());
    Lie { site, emulator, root, small, large }
}

impl Lie {
    /// Fetches a file with curl, within the timeout. Returns the status and the body.
    fn get(&self, name: &str) -> (u32, Vec<u8>) {
        let began = Instant::now();
        let out = Command::new("curl")
            .args(["-sS", "--max-time", "30", "-o", "-", "-w", "%{stderr}%{http_code}"])
            .arg(format!("{}/v1/versions/{}/files/{name}", self.site.url, self.root))
            .output()
            .expect("curl runs");
        assert!(began.elapsed() < IO_TIMEOUT + Duration::from_secs(2), "{:?}", began.elapsed());
        let status = String::from_utf8_lossy(&out.stderr);
        let status = status.trim().rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|s| s.parse().ok());
        (status.unwrap_or(0), out.stdout)
    }

    fn is_right(&self, name: &str) {
        let (status, body) = self.get(name);
        let right = if name == "small" { &self.small } else { &self.large };
        assert!(status == 200 && body == *right, "{name}: {status}, {} bytes", body.len());
    }

    /// Checks that a file gives an error of this code.
    ///
    /// The server sends a large file slice by slice, so its body may also end early. Then its bytes must be
    /// right.
    fn is_refused(&self, name: &str, code: &str) {
        let (status, body) = self.get(name);
        let right = if name == "small" { &self.small } else { &self.large };
        if status == 200 {
            assert!(name == "large" && body.len() < right.len(), "{name}: a whole answer");
            assert!(right.starts_with(&body), "{name}: wrong bytes");
            return;
        }
        let text = String::from_utf8_lossy(&body);
        assert!(status >= 500 && text.contains(code), "{name}: {status} {text}");
    }

    fn errors(&self, kind: &str) -> f64 {
        self.series(&format!("fletch_origin_errors_total{{error=\"{kind}\"}}"))
    }

    fn series(&self, key: &str) -> f64 {
        self.site.metrics().get(key).copied().unwrap_or(0.0)
    }

    /// Checks that both files give `code` while the fault lasts, counted as `error`, and are right after it.
    ///
    /// So the server keeps no error and no wrong byte.
    fn lasting(&self, fault: &Fault, code: &str, error: &str) {
        self.emulator.set_fault("set/", fault.clone(), None);
        self.is_refused("small", code);
        let one = self.errors(error);
        assert!(one >= 1.0, "{error} is counted: {:#?}", self.site.metrics());
        self.is_refused("large", code);
        assert!(self.errors(error) > one, "{error} is counted each time");
        self.emulator.clear_faults();
        self.is_right("small");
        self.is_right("large");
    }
}

#[test]
fn a_range_answered_with_200() {
    setup().lasting(&Fault::IgnoreRange, "origin_invalid", "wrong_answer");
}

#[test]
fn a_wrong_range() {
    let lie = setup();
    // The small file is asked for whole: there is no other range of it to be had.
    lie.emulator.set_fault("set/", Fault::ShiftRange(1), None);
    lie.is_right("small");
    lie.is_refused("large", "origin_invalid");
    assert!(lie.errors("wrong_answer") >= 1.0);
    lie.emulator.clear_faults();
    lie.is_right("large");
}

#[test]
fn a_wrong_length() {
    setup().lasting(&Fault::Short { by: 1 }, "origin_invalid", "wrong_answer");
}

#[test]
fn an_early_close() {
    let lie = setup();
    lie.emulator.set_fault("set/small", Fault::Truncate { after: 50_000 }, Some(2));
    lie.is_right("small");
    assert_eq!(lie.site.metric("fletch_origin_retries_total"), 2.0, "asked again until it was whole");
    assert_eq!(lie.errors("unavailable"), 0.0);
    lie.emulator.set_fault("set/large", Fault::Truncate { after: 50_000 }, None);
    lie.is_refused("large", "origin_unavailable");
    assert!(lie.errors("unavailable") >= 1.0);
    lie.emulator.clear_faults();
    lie.is_right("large");
}

#[test]
fn a_changed_etag() {
    let lie = setup();
    lie.emulator.set_fault("set/", Fault::ChangeEtag, None);
    lie.is_right("small");
    lie.is_right("large");
    assert_eq!(lie.errors("changed"), 0.0, "equal bytes under a new tag are no error");
}

#[test]
fn never() {
    setup().lasting(&Fault::Stall, "origin_unavailable", "unavailable");
    // Once is no harm: a third of the time is left for another connection.
    let lie = setup();
    lie.emulator.set_fault("set/", Fault::Stall, Some(1));
    lie.is_right("small");
}

#[test]
fn a_flipped_bit() {
    let lie = setup();
    lie.emulator.set_fault("set/small", Fault::FlipBit { byte: 77 }, Some(1));
    lie.is_right("small");
    assert!(lie.series("fletch_corrupt_total{source=\"hash\"}") >= 1.0, "{:#?}", lie.site.metrics());
    lie.emulator.set_fault("set/large", Fault::FlipBit { byte: 5_000_000 }, None);
    lie.is_refused("large", "origin_corrupt");
    lie.emulator.clear_faults();
    lie.is_right("large");
}
