//! Chunk rows and their index; the cache of parts: shared loads, no kept errors, a bound.

mod support;

use fletch_core::manifest::{Entry, LayoutParams, SampleRule, Slice};
use fletch_core::{Hash, Kind};
use fletch_tables::{NewChunk, NewRow, ObjectRef, PartCache, PinRow, SourceError, TablesWriter};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use support::{Files, make, runtime};

fn many(n: u64) -> Vec<Entry> {
    (0..n).map(|i| Entry::file(format!("{i:08}"), 1 + i / 2 % 7, Hash::of(&(i / 2).to_le_bytes()))).collect()
}

#[test]
fn every_chunk_is_found_at_every_place_it_has() {
    let mut entries = many(12_000);
    entries.push(Entry::file("big", (9 << 20) + 5, Hash::of(b"big")));
    let made = make(&entries);
    runtime().block_on(async {
        let v = made.open().await;
        assert!(v.index().parts().len() > 1);
        let index = v.chunk_index().await.expect("good");
        assert_eq!(index.len() as u64, made.written.chunks);
        assert_eq!(index.len(), entries.len() + 2);
        for e in entries.iter().step_by(97) {
            let mut places = Vec::new();
            for s in support::slices(e, LayoutParams::INDEX) {
                for (part, row) in index.find(s.chunk) {
                    let rows = v.chunk_rows(part).await.expect("good");
                    let r = &rows[row];
                    assert_eq!((r.chunk, r.len), (s.chunk, s.len));
                    let ObjectRef::Entry { row } = r.object else { panic!("an index has no keys") };
                    let loaded = v.part(part).await.expect("good");
                    let at = loaded.entry(row as usize);
                    assert_eq!(r.pin.size, at.size);
                    assert_eq!(r.pin.mtime_ns, Some(-5));
                    places.push((at.path.to_owned(), r.offset));
                }
            }
            assert!(places.iter().any(|(p, _)| *p == e.path), "{}", e.path);
            assert!(v.try_chunk_row(0, 0).is_some() || e.path == "big");
        }
        let big: Vec<u64> = {
            let f = v.find("big").await.expect("good").expect("there");
            let (part, row) = v.index().find(f.ordinal).expect("there");
            let rows = v.chunk_rows(part).await.expect("good");
            rows.iter()
                .filter(|r| r.object == ObjectRef::Entry { row: row as u32 })
                .map(|r| r.offset)
                .collect()
        };
        assert_eq!(big, [0, 4 << 20, 8 << 20]);
        assert_eq!(index.find(Hash::of(b"nowhere")).count(), 0);
    });
}

#[test]
fn a_chunk_of_its_own_object_is_written_once_a_part() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut w =
        TablesWriter::create(scratch.path(), SampleRule::file(), LayoutParams::PACK).expect("scratch");
    let chunk = Hash::of(b"packed");
    let pin = PinRow { size: 4096, mtime_ns: None, etag: None };
    for i in 0..4u32 {
        let entry = Entry::file(format!("f{i}"), 10, Hash::of(&i.to_le_bytes()));
        let object = Some(format!("fletch/chunks/ab/{chunk}"));
        w.push(NewRow {
            entry,
            slices: vec![Slice { chunk, chunk_offset: 512 * i, len: 10 }],
            chunks: vec![NewChunk { chunk, len: 4096, object, offset: 0, pin: pin.clone() }],
        })
        .expect("good");
    }
    let written = w.finish(support::about()).expect("written");
    assert_eq!(written.chunks, 1);
    let files = Arc::new(Files::load(&written));
    runtime().block_on(async {
        let v = fletch_tables::Version::open(files, written.root, written.layout, PartCache::new(1 << 20))
            .await
            .expect("good");
        let rows = v.chunk_rows(0).await.expect("good");
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].object, ObjectRef::Key(format!("fletch/chunks/ab/{chunk}")));
        assert_eq!(v.find("f3").await.expect("good").expect("there").slices()[0].chunk_offset, 1536);
    });
}

#[test]
fn a_part_is_loaded_once_however_many_ask() {
    let made = make(&many(3000));
    let files = Arc::new(Files { files: made.files.files.clone(), slow: true, ..Files::default() });
    runtime().block_on(async {
        let v = made.open_with(files.clone(), PartCache::new(64 << 20)).await.expect("good");
        let before = files.reads_of_entries.load(Ordering::Relaxed);
        // The first to ask goes away at once; the others must not notice.
        let mut first = Box::pin(v.part(0));
        assert!(futures::poll!(first.as_mut()).is_pending());
        let all = futures::future::join_all((0..64).map(|_| v.part(0)));
        let (all, ()) = futures::join!(all, async {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            drop(first);
        });
        assert!(all.iter().all(|p| p.as_ref().is_ok_and(|p| p.entry(0).path == "00000000")));
        assert_eq!(files.reads_of_entries.load(Ordering::Relaxed) - before, 1);
        assert!(v.try_entry(0).is_some(), "it is in memory now");
    });
}

#[test]
fn an_error_reaches_all_and_is_not_kept() {
    let made = make(&many(100));
    runtime().block_on(async {
        let v = made.open().await;
        let error = SourceError { kind: Kind::Unavailable, message: "gone for a while".into() };
        *made.files.fail.lock() = Some(error.clone());
        let all = futures::future::join_all((0..8).map(|_| v.part(0))).await;
        assert!(all.iter().all(|r| r.as_ref().is_err_and(|e| e.kind() == Kind::Unavailable)));
        assert!(v.chunk_index().await.is_err());
        *made.files.fail.lock() = None;
        assert!(v.part(0).await.is_ok());
        assert_eq!(v.chunk_index().await.expect("good").len(), 100);
        // All who asked go away: the next one begins anew.
        let slow = Files { files: made.files.files.clone(), slow: true, ..Files::default() };
        let v2 = made.open_with(Arc::new(slow), PartCache::new(1 << 20)).await.expect("good");
        let mut abandoned = Box::pin(v2.part(0));
        assert!(futures::poll!(abandoned.as_mut()).is_pending());
        drop(abandoned);
        assert!(v2.part(0).await.is_ok());
    });
}

#[test]
fn the_cache_keeps_to_its_bytes() {
    let made = make(&many(40_000));
    runtime().block_on(async {
        let cache = PartCache::new(1 << 20);
        let v = made.open_with(made.files.clone(), cache.clone()).await.expect("good");
        for part in 0..v.index().parts().len() {
            v.part(part).await.expect("good");
            v.chunk_rows(part).await.expect("good");
            assert!(cache.bytes() <= 1 << 20, "{} bytes", cache.bytes());
        }
    });
}
