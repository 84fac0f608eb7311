//! Datasets at a plain HTTP server, through index, server and mount: odd but legal answers, and wrong ones.
//!
//! A wrong answer is the origin's fault: the reader gets `origin_invalid` with status, encoding and length.
//! It is never `internal` and never a changed object, and no text of the answer is quoted anywhere.

use fletch_testkit::scripted::{ScriptedServer, answer, header};
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::fixture::Site;
use parking_lot::Mutex;
use std::fs;
use std::process::Command;
use std::sync::Arc;

const SECRET: &str = "hunter2SECRET";
const LAST_MODIFIED: (&str, &str) = ("Last-Modified", "Sun, 06 Nov 1994 08:49:37 GMT");

/// What the server does instead of its duty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    None,
    Redirect,
    NoContent,
    Gzip,
    OtherRange,
    WrongLength,
    Forbidden,
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// Returns the answer of an honest server, which does not say how long an object is when it sends a range.
fn honest(head: &str, all: &[u8], shift: usize) -> Vec<u8> {
    let kept = [LAST_MODIFIED, ("ETag", "\"v1\"")];
    if head.starts_with("HEAD ") {
        let length = all.len().to_string();
        return answer("200 OK", &[kept[0], kept[1], ("Content-Length", &length)], b"");
    }
    let range = header(head, "range").and_then(|r| r.strip_prefix("bytes=")?.split_once('-'));
    let Some((first, last)) = range else { return answer("200 OK", &kept, all) };
    let (first, last): (usize, usize) = (first.parse().expect("first"), last.parse().expect("last"));
    let (first, last) = (first + shift, (last + shift).min(all.len() - 1));
    let range = format!("bytes {first}-{last}/*");
    answer("206 Partial Content", &[kept[0], kept[1], ("Content-Range", &range)], &all[first..=last])
}

fn lying(lie: Lie, head: &str, all: &[u8]) -> Vec<u8> {
    let kept = [LAST_MODIFIED, ("ETag", "\"v1\"")];
    match lie {
        Lie::None => honest(head, all, 0),
        Lie::Redirect => {
            let to = [("Location", "http://169.254.169.254/latest/meta-data/hunter2SECRET")];
            answer("302 Found", &to, SECRET.as_bytes())
        }
        Lie::NoContent => answer("204 No Content", &[("Content-Length", "")], b""),
        Lie::Gzip => answer("200 OK", &[kept[0], kept[1], ("Content-Encoding", "gzip")], SECRET.as_bytes()),
        Lie::OtherRange if header(head, "range").is_some() => honest(head, all, 7),
        Lie::OtherRange | Lie::WrongLength => answer("200 OK", &kept, SECRET.as_bytes()),
        Lie::Forbidden => answer("403 hunter2SECRET", &[], SECRET.as_bytes()),
    }
}

struct Setup {
    site: Site,
    lie: Arc<Mutex<Lie>>,
    root: String,
    small: Vec<u8>,
    large: Vec<u8>,
    _server: ScriptedServer,
}

/// A plain server with a small file and one of 9 MB, indexed and registered.
fn setup() -> Setup {
    let (small, large) = (bytes(1, 100_000), bytes(2, 9_000_000));
    let lie = Arc::new(Mutex::new(Lie::None));
    let (told, s, l) = (Arc::clone(&lie), small.clone(), large.clone());
    let server = ScriptedServer::start(move |head| {
        let lie = *told.lock();
        match head.split(' ').nth(1) {
            Some("/set/small") => lying(lie, head, &s),
            Some("/set/large") => lying(lie, head, &l),
            _ => answer("404 Not Found", &[], b""),
        }
    });
    let dir = tempfile::tempdir().expect("tempdir");
    let (config, list) = (dir.path().join("fletch.toml"), dir.path().join("names"));
    let text = format!("[[origin]]\nprefix = \"{}\"\nallow_http = true\n", server.endpoint());
    fs::write(&config, text).expect("config");
    fs::write(&list, "large\nsmall\n").expect("names");
    let config = config.display().to_string();
    let site = Site::start(&["--config", &config, "--io-timeout", "4s"]);
    let (uri, to) = (format!("{}/set", server.endpoint()), site.place("tables"));
    let mut index = command("fletch");
    index.args(["index", &uri, "--config", &config, "--list"]).arg(&list).arg("--to").arg(&to);
    let root = stdout(&run(index.arg("--state-dir").arg(site.place("index-state"))));
    site.register("set", &uri, &to.display().to_string());
    Setup { site, lie, root, small, large, _server: server }
}

impl Setup {
    fn lie(&self, lie: Lie) {
        *self.lie.lock() = lie;
    }

    /// Fetches a file with curl. Returns the status and the body.
    fn get(&self, name: &str) -> (u32, Vec<u8>) {
        let out = Command::new("curl")
            .args(["-sS", "--max-time", "60", "-o", "-", "-w", "%{stderr}%{http_code}"])
            .arg(format!("{}/v1/versions/{}/files/{name}", self.site.url, self.root))
            .output()
            .expect("curl runs");
        let status = String::from_utf8_lossy(&out.stderr);
        let status = status.trim().rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|s| s.parse().ok());
        (status.unwrap_or(0), out.stdout)
    }
}

#[test]
fn ranges_without_the_size_of_the_object_serve_large_files() {
    let setup = setup();
    let mount = setup.site.mount("set", "train", &[]);
    assert!(fs::read(mount.dir.join("large")).expect("9 MB through the mount") == setup.large);
    assert!(fs::read(mount.dir.join("small")).expect("small") == setup.small);
    let (status, body) = setup.get("large");
    assert!(status == 200 && body == setup.large, "{status}, {} bytes", body.len());
}

#[test]
fn wrong_answers_are_the_origins_fault_and_are_not_quoted() {
    let setup = setup();
    let mut outputs = String::new();
    let cases = [
        (Lie::Redirect, "origin_invalid", vec!["status 302", "redirects"]),
        (Lie::NoContent, "origin_invalid", vec!["status 204", "no Content-Length"]),
        (Lie::Gzip, "origin_invalid", vec!["status 200", "Content-Encoding gzip", "the stored bytes"]),
        (Lie::WrongLength, "origin_invalid", vec!["status 200", "Content-Length 13", "100000 bytes"]),
        (Lie::Forbidden, "origin_denied", vec!["status 403"]),
    ];
    for (lie, code, words) in cases {
        setup.lie(lie);
        // The small file is read whole. No byte of it was sent, so the answer is a problem.
        let (status, body) = setup.get("small");
        let text = String::from_utf8_lossy(&body).into_owned();
        assert_eq!(status, 502, "{lie:?}: {text}");
        for word in words.iter().chain(&[code]) {
            assert!(text.contains(word), "{lie:?}: {text} should name {word}");
        }
        assert!(!text.contains("internal") && !text.contains("changed after"), "{lie:?}: {text}");
        outputs.push_str(&text);
    }
    setup.lie(Lie::OtherRange);
    let (status, body) = setup.get("large");
    let text = String::from_utf8_lossy(&body).into_owned();
    assert!(status == 502 && text.contains("origin_invalid") && text.contains("expected bytes"), "{text}");
    // A mount sees the same fault, and blames neither itself nor its server.
    let mount = setup.site.mount("set", "train", &["--io-timeout", "4s"]);
    for lie in [Lie::Redirect, Lie::Gzip] {
        setup.lie(lie);
        let error = fs::read(mount.dir.join("small")).expect_err("a lie");
        assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
    }
    let log = setup.site.mount_log("train");
    assert!(log.contains("origin_invalid") && log.contains("status 302"), "{log}");
    outputs.push_str(&text);
    outputs.push_str(&log);
    outputs.push_str(&setup.site.log());
    let quoted = outputs.lines().find(|line| line.contains(SECRET));
    assert_eq!(quoted, None, "an answer is quoted");
    setup.lie(Lie::None);
    assert!(fs::read(mount.dir.join("small")).expect("well again") == setup.small);
}
