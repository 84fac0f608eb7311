use crate::{limits, names};
use bytes::Bytes;
use fletch_origin::{Origin, OriginConfig, OriginError, OriginLimits, OriginUri, Origins, PutMode, local};
use fletch_testkit::{dataset, seeds};
use futures::{StreamExt as _, TryStreamExt as _};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

fn open(dir: &Path, limits: OriginLimits) -> (Origins, Origin) {
    let origins = Origins::new(vec![], limits).expect("no configuration");
    let origin = origins.open(&OriginUri::local(dir).expect("a path")).expect("open");
    (origins, origin)
}

#[tokio::test]
async fn a_hostile_tree_cannot_hang_a_read() {
    let dir = tempfile::tempdir().expect("tempdir");
    let at = |name: &str| dir.path().join(name);
    let made = Command::new("mkfifo").arg(at("fifo")).status().expect("mkfifo runs");
    assert!(made.success());
    let _socket = UnixListener::bind(at("socket")).expect("a socket");
    symlink("/dev/zero", at("zero")).expect("link");
    symlink("/dev/tty", at("tty")).expect("link");
    symlink(at("fifo"), at("to-fifo")).expect("link");
    symlink("loop", at("loop")).expect("link");
    symlink("nowhere", at("dangling")).expect("link");
    symlink("real", at("to-real")).expect("link");
    fs::write(at("real"), b"bytes").expect("written");
    let (_, origin) = open(dir.path(), limits(10_000));
    let began = Instant::now();
    for name in ["fifo", "socket", "zero", "to-fifo", "loop"] {
        let get = origin.get(name, None, None).await.expect_err(name);
        let range = origin.get(name, Some(0..1), None).await.expect_err(name);
        let head = origin.head(name).await.expect_err(name);
        let file = origin.put_file("copy", &at(name), PutMode::Create).await.expect_err(name);
        for error in [get, range, head, file] {
            assert!(matches!(error, OriginError::Invalid { .. }), "{name}: {error:?}");
        }
    }
    assert!(origin.get("tty", None, None).await.is_err());
    assert!(matches!(origin.get("dangling", None, None).await, Err(OriginError::NotFound { .. })));
    assert_eq!(origin.get("to-real", None, None).await.expect("followed").bytes, "bytes");
    assert_eq!(names(&origin, "").await, ["real"], "links and special files are not objects");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test]
async fn an_unlistable_name_is_an_error_in_its_place() {
    let dir = tempfile::tempdir().expect("tempdir");
    for name in [b"a".as_slice(), b"b\xff", b"c", b"d\xfe/x"] {
        let path = dir.path().join(OsStr::from_bytes(name));
        fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
        fs::write(path, b"1").expect("written");
    }
    fs::write(dir.path().join(format!("{}x", local::TEMPORARY)), b"1").expect("written");
    let (origins, origin) = open(dir.path(), limits(10_000));
    let seen: Vec<String> = origin
        .list("")
        .map(|item| match item {
            Ok(meta) => meta.path,
            Err(OriginError::Invalid { why, .. }) => why,
            Err(other) => panic!("{other:?}"),
        })
        .collect()
        .await;
    let rejected = "the file name is not UTF-8; rename the file";
    assert_eq!(seen, ["a", rejected, "c", rejected]);
    assert_eq!(origins.stats().invalid, 2);
}

#[tokio::test]
async fn a_whole_tree_is_listed_as_it_was_written() {
    let dir = tempfile::tempdir().expect("tempdir");
    let spec = dataset::Spec { files: 3_000, median_bytes: 64, ..dataset::Spec::default() };
    let tree = dataset::write_tree(dir.path(), seeds::seed(), &spec).expect("written");
    let (_, origin) = open(dir.path(), limits(10_000));
    let listed: Vec<(String, u64)> =
        origin.list("").map_ok(|m| (m.path, m.size)).try_collect().await.expect("a listing");
    assert_eq!(listed, tree.files);
}

#[tokio::test]
async fn a_pin_notices_a_rewrite_and_a_touch_and_nothing_else() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("x");
    fs::write(&path, b"12345").expect("written");
    let (_, origin) = open(dir.path(), limits(10_000));
    let pin = local::pin_of(&fs::metadata(&path).expect("metadata"));
    let got = origin.get("x", None, Some(&pin)).await.expect("read");
    assert_eq!(got.meta.pin(), pin, "reading changes no pin");
    assert_eq!(origin.list("").try_collect::<Vec<_>>().await.expect("listed")[0].pin(), pin);
    std::thread::sleep(Duration::from_millis(20));
    fs::write(&path, b"54321").expect("written");
    let now = origin.get("x", None, Some(&pin)).await.expect("same size: the bytes will tell").meta.pin();
    assert!(now.etag != pin.etag && now.mtime_ns != pin.mtime_ns);
    // Setting the modification time back does not restore the etag.
    let file = fs::File::options().write(true).open(&path).expect("open");
    let then = std::time::UNIX_EPOCH + Duration::from_nanos(pin.mtime_ns.expect("a time") as u64);
    file.set_modified(then).expect("touched");
    let back = origin.head("x").await.expect("head").pin();
    assert!(back.mtime_ns == pin.mtime_ns && back.etag != pin.etag);
}

#[tokio::test]
async fn writes_leave_nothing_behind_and_honour_the_umask() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (_, origin) = open(dir.path(), limits(10_000));
    origin.put("d/x", Bytes::from_static(b"1"), PutMode::Create).await.expect("put");
    origin.put("d/x", Bytes::from_static(b"2"), PutMode::Create).await.expect_err("there already");
    origin.put("d/x", Bytes::from_static(b"3"), PutMode::Overwrite).await.expect("put");
    fs::create_dir(dir.path().join("d/dir")).expect("mkdir");
    let error = origin.put("d/dir", Bytes::new(), PutMode::Overwrite).await.expect_err("a directory");
    assert!(matches!(error, OriginError::Invalid { .. }), "{error:?}");
    origin.put("d/x/y", Bytes::new(), PutMode::Create).await.expect_err("below a file");
    let mut left: Vec<_> =
        fs::read_dir(dir.path().join("d")).expect("read").map(|e| e.expect("entry").file_name()).collect();
    left.sort();
    assert_eq!(left, ["dir", "x"]);
    let plain = dir.path().join("plain");
    fs::write(&plain, b"").expect("written");
    let mode = |p: &Path| fs::metadata(p).expect("metadata").permissions().mode();
    assert_eq!(mode(&dir.path().join("d/x")), mode(&plain));
}

#[tokio::test]
async fn reads_are_bounded_and_counted() {
    let dir = tempfile::tempdir().expect("tempdir");
    fs::write(dir.path().join("x"), vec![1; 1001]).expect("written");
    let (origins, origin) = open(dir.path(), OriginLimits { get_bytes_max: 1000, ..limits(10_000) });
    for range in [None, Some(0..1001)] {
        let error = origin.get("x", range, None).await.expect_err("too long");
        assert!(error.to_string().contains("by range"), "{error}");
    }
    assert_eq!(origin.get("x", Some(1..1001), None).await.expect("read").bytes.len(), 1000);
    assert!(origin.get("y", None, None).await.is_err());
    let stats = origins.stats();
    assert_eq!((stats.bytes_read, stats.invalid, stats.not_found), (1000, 2, 1));
}

#[test]
fn configurations_are_checked_all_at_once() {
    let table = |prefix: &str, endpoint: Option<&str>| OriginConfig {
        prefix: prefix.to_owned(),
        endpoint: endpoint.map(str::to_owned),
        ..OriginConfig::default()
    };
    let wrong = vec![
        table("s3://bucket", Some("http://127.0.0.1:1")),
        table("s3://bucket/a", Some("https://key:hunter2@host")),
        table("ftp://bucket", None),
        table("/data", None),
        table("file:///data/", None),
        table("/other", Some("https://host")),
    ];
    let error = Origins::new(wrong, OriginLimits::default()).expect_err("wrong").to_string();
    for part in
        ["allow_http", "user or password", "ftp://", "file:///data is configured twice", "file:///other"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!error.contains("hunter2"), "{error}");
    assert!(Origins::new(vec![], OriginLimits { requests_max: 0, ..OriginLimits::default() }).is_err());
}

/// A key that has no effect would mislead the administrator who wrote it.
#[test]
fn keys_of_servers_are_refused_at_a_directory() {
    let dir = OriginConfig { prefix: "/data".to_owned(), ..OriginConfig::default() };
    Origins::new(vec![OriginConfig { domains: vec!["d".to_owned()], ..dir.clone() }], limits(1_000))
        .expect("a prefix and domains");
    let cases: [(&str, OriginConfig); 8] = [
        ("allow_http", OriginConfig { allow_http: true, ..dir.clone() }),
        ("allow_link_local", OriginConfig { allow_link_local: true, ..dir.clone() }),
        ("proxy", OriginConfig { proxy: Some("http://p:1".to_owned()), ..dir.clone() }),
        ("concurrency", OriginConfig { concurrency: Some(4), ..dir.clone() }),
        ("requests_per_second", OriginConfig { requests_per_second: Some(4), ..dir.clone() }),
        ("bytes_per_second", OriginConfig { bytes_per_second: Some(4), ..dir.clone() }),
        ("region", OriginConfig { region: Some("r".to_owned()), ..dir.clone() }),
        ("endpoint", OriginConfig { endpoint: Some("https://e".to_owned()), ..dir.clone() }),
    ];
    for (key, config) in cases {
        let text = Origins::new(vec![config], limits(1_000)).expect_err(key).to_string();
        assert!(text.contains(&format!("takes no {key};")) && text.contains("/data"), "{text}");
    }
    let all = OriginConfig { allow_http: true, concurrency: Some(4), bytes_per_second: Some(1), ..dir };
    let text = Origins::new(vec![all], limits(1_000)).expect_err("three keys").to_string();
    assert!(text.contains("allow_http, concurrency, bytes_per_second"), "{text}");
}
