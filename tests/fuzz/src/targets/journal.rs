//! Journals of a stopped `fletch index`, which the next run reads.

use crate::{plant, repair, scratch};
use fletch_core::{
    Hash,
    manifest::{Slice, tar::shard::ShardMember},
};
use fletch_indexer::{
    run::{
        file_record::Earlier as _,
        journal::files::{FileJournalReader, FileJournalWriter},
    },
    source::content::Content,
};
use fletch_tables::PinRow;
use std::fs;

pub fn seeds() -> Vec<Vec<u8>> {
    let dir = scratch::path("journal-seed");
    let mut writer = FileJournalWriter::create(dir.clone(), 10_000_000_000).expect("a journal");
    for i in 0..4u64 {
        let hash = Hash::of(&i.to_le_bytes());
        let slice = Slice { chunk: hash, chunk_offset: 0, len: 7 };
        let member = ShardMember { name: format!("m{i}"), size: 3, hash, slices: vec![slice] };
        let members = if i % 2 == 0 { Vec::new() } else { vec![member] };
        let content = Content { hash, slices: vec![slice; usize::try_from(i).expect("small")], members };
        let pin = PinRow { size: i, mtime_ns: Some(5), etag: Some("1-5".into()) };
        writer.push(&format!("dir/{i}"), &pin, &content).expect("a file");
    }
    writer.flush().expect("written");
    vec![fs::read(dir.join("00000000.log")).expect("a segment")]
}

/// The files come in the order of their paths, once each, and not more than the journal says.
pub fn run(input: &[u8]) -> bool {
    let dir = scratch::path("journal");
    fs::create_dir_all(&dir).expect("a directory");
    fs::write(dir.join("00000000.log"), repair::log(input)).expect("a segment");
    let mut journal = FileJournalReader::open(&dir, true);
    let (most, mut before, mut files) = (journal.files, None, 0);
    while let Some((path, record)) = journal.next().expect("a journal has no errors") {
        assert!(before.as_ref().is_none_or(|before| *before < path), "{path} is out of order");
        plant::bug(record.pin.size > 1 << 40);
        before = Some(path);
        files += 1;
    }
    assert!(files <= most, "{files} files of {most}");
    files > 0
}
