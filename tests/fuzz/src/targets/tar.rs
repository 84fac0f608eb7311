//! Tar archives, which `fletch index` reads as shards.

use crate::{plant, repair};
use fletch_core::{
    Hash,
    manifest::tar::{
        Found, TarScanner,
        shard::{Sharded, Sharder},
    },
};

/// The longest slice here, in bytes.
const SLICE_BYTES: u32 = 1024;

pub fn seeds() -> Vec<Vec<u8>> {
    let archive = |add: fn(&mut tar::Builder<Vec<u8>>) -> std::io::Result<()>| {
        let mut builder = tar::Builder::new(Vec::new());
        add(&mut builder).and_then(|()| builder.into_inner()).expect("an archive in memory")
    };
    fn file(b: &mut tar::Builder<Vec<u8>>, name: &str, bytes: &[u8]) -> std::io::Result<()> {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        b.append_data(&mut header, name, bytes)
    }
    let short = archive(|b| {
        file(b, "0001.jpg", &[7; 700])?;
        file(b, "0001.cls", b"3")?;
        file(b, "0002.jpg", &[8; 1500])
    });
    let long = archive(|b| {
        let mut header = tar::Header::new_gnu();
        header.set_size(5);
        header.set_mode(0o644);
        b.append_data(&mut header, format!("{}/{}.txt", "d".repeat(120), "n".repeat(90)), &b"hello"[..])?;
        b.append_pax_extensions([("size", &b"4"[..]), ("path", b"renamed.txt")])?;
        let mut header = tar::Header::new_ustar();
        header.set_size(4);
        header.set_path("x.txt")?;
        header.set_cksum();
        b.append(&header, &b"four"[..])?;
        let mut link = tar::Header::new_ustar();
        link.set_entry_type(tar::EntryType::Symlink);
        link.set_size(0);
        b.append_link(&mut link, "link", "x.txt")
    });
    vec![short, long]
}

/// An archive gives the same members in one piece and in many. Each member's bytes have its hash, and the
/// `tar` crate finds no other bytes under its name.
pub fn run(input: &[u8]) -> bool {
    let archive = repair::tar(input);
    let whole = shard(&archive, usize::MAX);
    assert_eq!(shard(&archive, 100), whole, "pieces change the members");
    let Some(sharded) = whole else { return false };
    assert_eq!(sharded.hash, Hash::of(&archive));
    let total: u64 = sharded.slices.iter().map(|s| u64::from(s.len)).sum();
    assert_eq!(total, archive.len() as u64, "the slices are not the archive");
    let mut scanner = TarScanner::new();
    let mut found = Vec::new();
    scanner.feed(&archive, &mut found).expect("an archive that the sharder took");
    for item in &found {
        let Found::Member { name, offset, size } = item else { continue };
        let member = sharded.members.iter().find(|m| m.name == *name).expect("a member that was found");
        let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let bytes = &archive[at(*offset)..at(offset + size)];
        assert_eq!((member.size, member.hash), (*size, Hash::of(bytes)), "{name:?}");
    }
    agrees(&archive, &found);
    plant::bug(sharded.members.iter().any(|m| m.size > 1500));
    true
}

fn shard(archive: &[u8], piece: usize) -> Option<Sharded> {
    let mut sharder = Sharder::new(SLICE_BYTES);
    for bytes in archive.chunks(piece.min(archive.len()).max(1)) {
        sharder.feed(bytes).ok()?;
    }
    sharder.finish().ok()
}

/// Compares with the `tar` crate, as far as that reads the archive without an error.
///
/// The crate ignores some pax records, and takes a NUL as a part of a long name, where GNU tar, Python and
/// Fletch do not. So it decides only where it gives a member the same name.
///
/// It takes an extended header for a member where the header's magic or version is not one that it knows. The
/// others go by the kind alone. From there on it reads another archive.
fn agrees(archive: &[u8], found: &[Found]) {
    let mut reader = tar::Archive::new(archive);
    let Ok(entries) = reader.entries() else { return };
    for entry in entries {
        let Ok(entry) = entry else { return };
        let kind = entry.header().entry_type();
        if kind.is_pax_local_extensions() || kind.is_gnu_longname() || kind.is_gnu_longlink() {
            return;
        }
        let (at, len, name) = (entry.raw_file_position(), entry.size(), entry.path_bytes());
        for item in found {
            if let Found::Member { name: ours, offset, size } = item
                && (*offset, ours.as_bytes()) == (at, &name[..])
            {
                assert_eq!(*size, len, "the tar crate reads {ours:?} with another length");
            }
        }
    }
}
