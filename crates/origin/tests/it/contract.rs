use crate::backends::TestOrigin;
use crate::names;
use bytes::Bytes;
use fletch_core::Kind;
use fletch_origin::{OriginError, Pin, PutMode};
use fletch_testkit::{dataset, seeds};
use futures::{StreamExt as _, TryStreamExt as _};
use rand::Rng as _;

pub async fn reads_return_exactly_the_requested_bytes(target: &TestOrigin) {
    let (name, origin) = (target.name, &target.origin);
    let mut rng = seeds::rng(seeds::seed());
    let bytes = Bytes::from(dataset::content(1, 2, 300_001));
    target.write("d/x", bytes.clone()).await;
    let got = origin.get("d/x", None, None).await.expect(name);
    assert!(got.bytes == bytes, "{name}");
    assert_eq!((got.meta.path.as_str(), got.meta.size), ("d/x", 300_001), "{name}");
    assert!(got.meta.etag.is_some() == target.etags && got.meta.mtime_ns.is_some(), "{name}");
    assert_eq!(origin.head("d/x").await.expect(name), got.meta, "{name}");
    let mut ranges = vec![0..1, 0..300_001, 300_000..300_001, 5..5, 0..0, 300_001..300_001];
    for _ in 0..20 {
        let start = rng.random_range(0..300_001);
        ranges.push(start..rng.random_range(start..=300_001));
    }
    for range in ranges {
        let got = origin.get("d/x", Some(range.clone()), None).await.expect(name);
        assert!(got.bytes == bytes[range.start as usize..range.end as usize], "{name} {range:?}");
        assert_eq!(got.meta.size, 300_001, "{name} {range:?}");
    }
    for range in [0..300_002, 300_001..300_002, 400_000..400_001, 300_002..300_002] {
        let error = origin.get("d/x", Some(range.clone()), None).await.expect_err(name);
        assert!(matches!(error, OriginError::Invalid { .. }), "{name} {range:?}: {error:?}");
    }
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is tested")]
    let error = origin.get("d/x", Some(9..3), None).await.expect_err(name);
    assert_eq!(error.kind(), Kind::Invalid, "{name}");
    for missing in ["nothing", "d", "d/x/y", "d/none"] {
        let whole = origin.get(missing, None, None).await.expect_err(name);
        let range = origin.get(missing, Some(0..1), None).await.expect_err(name);
        let head = origin.head(missing).await.expect_err(name);
        for error in [whole, range, head] {
            assert!(matches!(error, OriginError::NotFound { .. }), "{name} {missing}: {error:?}");
        }
    }
    target.write("empty", Bytes::new()).await;
    assert_eq!(origin.get("empty", None, None).await.expect(name).bytes, Bytes::new(), "{name}");
    assert_eq!(origin.get("empty", Some(0..0), None).await.expect(name).meta.size, 0, "{name}");
}

pub async fn create_happens_once_and_overwrite_replaces(target: &TestOrigin) {
    let (name, origin) = (target.name, &target.origin);
    let creates = (0..8u8).map(|i| origin.put("a/b/c", Bytes::from(vec![i; 10]), PutMode::Create));
    let done = futures::future::join_all(creates).await;
    let winners: Vec<usize> = (0..8).filter(|i| done[*i].is_ok()).collect();
    assert_eq!(winners.len(), 1, "{name}: {done:?}");
    for error in done.iter().filter_map(|r| r.as_ref().err()) {
        assert!(matches!(error, OriginError::AlreadyExists { .. }), "{name}: {error:?}");
    }
    assert_eq!(origin.get("a/b/c", None, None).await.expect(name).bytes, vec![winners[0] as u8; 10]);
    origin.put("a/b/c", Bytes::from_static(b"new"), PutMode::Overwrite).await.expect(name);
    assert_eq!(origin.get("a/b/c", None, None).await.expect(name).bytes, "new", "{name}");
    origin.delete("a/b/c").await.expect(name);
    origin.delete("a/b/c").await.expect("deleting again is no error");
    origin.delete("never/was").await.expect(name);
    assert!(matches!(origin.head("a/b/c").await, Err(OriginError::NotFound { .. })), "{name}");
    assert_eq!(names(origin, "").await, [""; 0], "{name}");
}

pub async fn odd_names_are_read_as_they_are(target: &TestOrigin) {
    let names = target.odd_names();
    for (i, odd) in names.iter().enumerate() {
        target.write(&format!("in {odd}/{odd}"), vec![b'x'; i]).await;
    }
    for (i, odd) in names.iter().enumerate() {
        let got = target.origin.get(&format!("in {odd}/{odd}"), None, None).await.expect(odd);
        assert_eq!(got.bytes.len(), i, "{} {odd}", target.name);
    }
}

pub async fn listings_are_complete_and_in_byte_order(target: &TestOrigin) {
    let (name, origin) = (target.name, &target.origin);
    let mut all: Vec<String> = target
        .odd_names()
        .iter()
        .flat_map(|odd| [format!("odd/{odd}"), format!("in {odd}/file")])
        .chain(["a", "a!", "a0", "b/x", "b-", "b/y/z", "b/y-"].map(str::to_owned))
        .collect();
    // `a` is a file: a directory beside it sorts by its slash.
    for (i, path) in all.iter().enumerate() {
        origin.put(path, Bytes::from(vec![b'x'; i]), PutMode::Create).await.expect(path);
    }
    for (i, path) in all.iter().enumerate() {
        assert_eq!(origin.get(path, None, None).await.expect(path).bytes.len(), i, "{name} {path}");
    }
    let listed: Vec<_> = origin.list("").try_collect().await.expect(name);
    for meta in &listed {
        assert_eq!(origin.head(&meta.path).await.expect(name).pin().size, meta.size, "{name}");
        assert_eq!(origin.head(&meta.path).await.expect(name).etag, meta.etag, "{name} {}", meta.path);
    }
    all.sort();
    assert_eq!(listed.into_iter().map(|m| m.path).collect::<Vec<_>>(), all, "{name}");
    assert_eq!(names(origin, "b").await, ["b/x", "b/y-", "b/y/z"], "{name}");
    assert_eq!(names(origin, "b/").await, ["b/x", "b/y-", "b/y/z"], "{name}");
    assert_eq!(names(origin, "b/y").await, ["b/y/z"], "{name}");
    assert_eq!(names(origin, "a").await, [""; 0], "{name}: a file is no directory");
    assert_eq!(names(origin, "none/at all").await, [""; 0], "{name}");
    assert!(matches!(origin.list("../x").next().await, Some(Err(OriginError::Invalid { .. }))), "{name}");
}

pub async fn listings_of_several_pages_are_complete(target: &TestOrigin) {
    let (name, origin) = (target.name, &target.origin);
    let puts = (0..2_345u32).map(|i| origin.put_owned(format!("p/{:04}/{i}", i % 7)));
    futures::stream::iter(puts).buffer_unordered(16).collect::<Vec<_>>().await;
    let mut all: Vec<String> = (0..2_345u32).map(|i| format!("p/{:04}/{i}", i % 7)).collect();
    all.sort();
    assert_eq!(names(origin, "").await, all, "{name}");
    let first: Vec<_> = origin.list("p").take(3).try_collect().await.expect("a reader may stop");
    assert_eq!(first.len(), 3, "{name}");
}

/// A put that owns its path, so that a stream can run many.
trait PutOwned {
    async fn put_owned(&self, path: String);
}

impl PutOwned for fletch_origin::Origin {
    async fn put_owned(&self, path: String) {
        self.put(&path, Bytes::new(), PutMode::Overwrite).await.expect("put");
    }
}

pub async fn a_changed_object_is_distinguished_from_the_pinned_one(target: &TestOrigin) {
    let (name, origin) = (target.name, &target.origin);
    target.write("x", "0123456789").await;
    let pin = origin.head("x").await.expect(name).pin();
    assert_eq!(origin.get("x", None, Some(&pin)).await.expect(name).meta.pin(), pin, "{name}");
    assert_eq!(origin.get("x", Some(2..4), Some(&pin)).await.expect(name).bytes, "23", "{name}");

    target.write("x", "9876543210").await;
    for range in [None, Some(0..4), Some(3..3)] {
        match origin.get("x", range.clone(), Some(&pin)).await {
            // A local file is still read: the caller hashes it and compares the pin.
            Ok(got) if origin.local_dir().is_some() => assert_ne!(got.meta.pin(), pin),
            Err(OriginError::Changed { .. }) if origin.local_dir().is_none() => {}
            other => panic!("{name} {range:?}: {other:?}"),
        }
    }
    for other in ["0123", "0123456789abc"] {
        target.write("x", other).await;
        // Without an etag only the size shows the change.
        for pin in [&pin, &Pin { etag: None, mtime_ns: None, ..pin.clone() }] {
            for range in [None, Some(2..3), Some(8..10)] {
                let error = origin.get("x", range.clone(), Some(pin)).await.expect_err(name);
                assert!(matches!(error, OriginError::Changed { .. }), "{name} {other} {range:?}: {error:?}");
                assert_eq!(error.kind(), Kind::Corrupt);
            }
        }
    }
    target.remove("x").await;
    let error = origin.get("x", None, Some(&pin)).await.expect_err(name);
    assert!(matches!(error, OriginError::NotFound { .. }), "{name}: {error:?}");
}

pub async fn paths_that_leave_the_origin_are_rejected_by_every_call(target: &TestOrigin) {
    let (name, origin) = (target.name, &target.origin);
    for bad in ["", "/etc/passwd", "../x", "a/../x", "a/./x", "a//x", "a/", "a\0b", &"a/".repeat(3000)] {
        let errors = [
            origin.get(bad, None, None).await.expect_err(name),
            origin.head(bad).await.expect_err(name),
            origin.put(bad, Bytes::new(), PutMode::Overwrite).await.expect_err(name),
            origin.put_file(bad, "/dev/null".as_ref(), PutMode::Overwrite).await.expect_err(name),
            origin.delete(bad).await.expect_err(name),
        ];
        for error in errors {
            assert!(matches!(error, OriginError::Invalid { .. }), "{name} {bad:?}: {error:?}");
        }
    }
}

pub async fn files_of_any_size_are_written_whole(target: &TestOrigin) {
    let (name, origin) = (target.name, &target.origin);
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("f");
    for size in [0, 1000, 16 << 20, (32 << 20) + 5] {
        let bytes = dataset::content(3, size, size);
        std::fs::write(&file, &bytes).expect("written");
        let path = format!("t/{size}");
        origin.put_file(&path, &file, PutMode::Create).await.expect(name);
        assert!(origin.get(&path, None, None).await.expect(name).bytes == bytes, "{name} {size}");
        let error = origin.put_file(&path, &file, PutMode::Create).await.expect_err(name);
        assert!(matches!(error, OriginError::AlreadyExists { .. }), "{name} {size}: {error:?}");
        std::fs::write(&file, b"short").expect("written");
        origin.put_file(&path, &file, PutMode::Overwrite).await.expect(name);
        assert_eq!(origin.get(&path, None, None).await.expect(name).bytes, "short", "{name} {size}");
    }
    let error = origin.put_file("t/x", &dir.path().join("none"), PutMode::Create).await.expect_err(name);
    assert!(matches!(error, OriginError::NotFound { .. }), "{name}: {error:?}");
    assert_eq!(names(origin, "t").await.len(), 4, "{name}");
}
