//! What a first run costs, said before it is paid: how much is read, for how long, and what is written.

use super::Context;
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use crate::progress::Total;
use crate::source::listing::{KeyOrder, KeySorting, Listed, ListingError, Objects};
use crate::source::name_list::NameList;
use crate::source::walk::{NAMES_BYTES_MAX, Symlinks, WalkOptions};
use fletch_origin::OriginUri;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How long the objects of a dataset are counted. A larger dataset is read without a forecast.
const COUNT_WITHIN: Duration = Duration::from_secs(5);
/// Usual speeds of a local disk: bytes and files a second.
const LOCAL: (u64, u64) = (400 << 20, 8_000);
/// Usual speeds of a store with many requests at once.
const STORE: (u64, u64) = (100 << 20, 700);
/// What is written for each file, and for each chunk of a large one.
const WRITTEN_PER_FILE: u64 = 220;
const WRITTEN_PER_CHUNK: u64 = 120;
const CHUNK_BYTES: u64 = 4 << 20;
/// What is written for any dataset.
const WRITTEN_ALWAYS: u64 = 16 << 10;

/// What a dataset holds, as far as it was counted in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    files: u64,
    bytes: u64,
    is_whole: bool,
    is_local: bool,
}

impl Cost {
    /// Counts the files of a dataset, for a few seconds at most.
    ///
    /// # Errors
    /// A store cannot be listed.
    pub fn of(ctx: &Context, uri: &OriginUri, names: Option<&NameList>) -> Result<Self, Failure> {
        match uri.as_local() {
            Some(dir) => Ok(local(dir)),
            None => ctx.rt.block_on(store(ctx, uri, names)),
        }
    }

    /// Returns what any dataset costs, for one that is not counted.
    #[must_use]
    pub fn least() -> Self {
        Cost { files: 0, bytes: 0, is_whole: false, is_local: true }
    }

    fn seconds(&self) -> u64 {
        let (bytes_s, files_s) = if self.is_local { LOCAL } else { STORE };
        (self.bytes / bytes_s + self.files / files_s).max(1)
    }

    /// Checks that there is room for the tables, before anything is read.
    ///
    /// Tables at a store need no room of this machine. Of a dataset that was not counted to its end, the
    /// counted part must have room.
    ///
    /// # Errors
    /// A [`Failure`] with [`Exit::NoSpace`].
    pub fn check_room(&self, to: &OriginUri) -> Result<(), Failure> {
        let Some(dir) = to.as_local() else { return Ok(()) };
        let Some(above) = dir.ancestors().find(|above| above.exists()) else { return Ok(()) };
        // A file system that does not say how much is free may have room.
        let Ok(space) = nix::sys::statvfs::statvfs(above) else { return Ok(()) };
        self.fits(dir, space.blocks_available().saturating_mul(space.fragment_size()))
    }

    fn fits(&self, dir: &std::path::Path, free: u64) -> Result<(), Failure> {
        let needed = self.written();
        if free >= needed {
            return Ok(());
        }
        let (shown, least) = (dir.display(), if self.is_whole { "about" } else { "more than" });
        Err(Failure::new(format!(
            "no room for the tables at {shown}: they take {least} {}, and {} are free",
            bytes(needed),
            bytes(free)
        ))
        .hint("free some space, or give another --state-dir or --tables; nothing was read")
        .exit(Exit::NoSpace))
    }

    fn written(&self) -> u64 {
        WRITTEN_ALWAYS + self.files * WRITTEN_PER_FILE + self.bytes / CHUNK_BYTES * WRITTEN_PER_CHUNK
    }

    /// Says the cost. `to` is where the names and checksums go, `packed` where the copies of a pack go.
    pub fn text(&self, to: &str, packed: bool) -> String {
        if !self.is_whole {
            let more = if self.files > 0 {
                format!("more than {}, {}", count(self.files, "file"), bytes(self.bytes))
            } else {
                "many files".to_owned()
            };
            let copies = if packed { "copies in large pieces, " } else { "" };
            return format!("reads everything now ({more}); writes {copies}names and checksums to {to}");
        }
        let (all, files, seconds) = (bytes(self.bytes), count(self.files, "file"), self.seconds());
        let time = if seconds < 120 { format!("{seconds} s") } else { format!("{} min", seconds / 60) };
        let written = bytes(self.written());
        let copies = if packed { format!("{all} of copies in large pieces and ") } else { String::new() };
        format!(
            "reads {all} now, {files}, about {time}; writes {copies}{written} of names and checksums to {to}"
        )
    }
}

fn local(dir: &std::path::Path) -> Cost {
    let tree = WalkOptions {
        base: dir.to_owned(),
        symlinks: Symlinks::Keep,
        exclude: BTreeSet::from(["fletch".to_owned()]),
        one_file_system: false,
        names_bytes_max: NAMES_BYTES_MAX,
    };
    let (total, late, done) = (Total::default(), AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            crate::source::count::count(&tree, &total, &late);
            done.store(true, Relaxed);
        });
        let until = Instant::now() + COUNT_WITHIN;
        while !done.load(Relaxed) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        late.store(!done.load(Relaxed), Relaxed);
    });
    let (files, bytes) = (total.files.load(Relaxed), total.bytes.load(Relaxed));
    Cost { files, bytes, is_whole: !late.load(Relaxed), is_local: true }
}

async fn store(ctx: &Context, uri: &OriginUri, names: Option<&NameList>) -> Result<Cost, Failure> {
    let origin = ctx.origins().open(uri)?;
    let temporary = std::env::temp_dir();
    let sorting = KeySorting { order: KeyOrder::Listed, scratch: &temporary, out: None };
    let mut objects = Objects::new(&origin, names, BTreeSet::new(), sorting);
    let until = Instant::now() + COUNT_WITHIN;
    let mut cost = Cost { files: 0, bytes: 0, is_whole: true, is_local: false };
    loop {
        match objects.next().await {
            Ok(Some(Listed::Object(meta))) => {
                cost.files += 1;
                cost.bytes += meta.size;
            }
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(ListingError::Unsorted) => {
                cost.is_whole = false;
                break;
            }
            Err(ListingError::Failure(failure)) => return Err(failure),
        }
        if Instant::now() >= until {
            cost.is_whole = false;
            break;
        }
    }
    Ok(cost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_is_said_in_bytes_and_time() {
        let cost = Cost { files: 2000, bytes: 190 << 20, is_whole: true, is_local: false };
        let said = cost.text("/state", false);
        assert!(said.starts_with("reads 190.00 MiB now, 2000 files, about 3 s; writes "), "{said}");
        assert!(said.ends_with(" of names and checksums to /state"), "{said}");
        assert!(cost.text("/state", true).contains("190.00 MiB of copies"));
        let long = Cost { bytes: 1 << 40, ..cost };
        assert!(long.text("/s", false).contains(" min;"), "{}", long.text("/s", false));
        let unknown = Cost { files: 7, is_whole: false, ..cost };
        assert!(unknown.text("/s", false).contains("more than 7 files"), "{}", unknown.text("/s", false));
    }

    #[test]
    fn tables_without_room_end_the_command_before_it_reads() {
        let cost = Cost { files: 1_000_000, bytes: 1 << 40, is_whole: true, is_local: false };
        let at = std::path::Path::new("/state/tables");
        assert!(cost.fits(at, cost.written()).is_ok());
        let full = cost.fits(at, cost.written() - 1).expect_err("no room");
        assert_eq!(full.exit, Exit::NoSpace);
        assert!(full.what.contains("/state/tables: they take about 2"), "{full}");
        let more = Cost { is_whole: false, ..cost }.fits(at, 0).expect_err("no room");
        assert!(more.what.contains("more than") && more.what.contains("0 B are free"), "{more}");
        let store = OriginUri::parse("s3://bucket/tables").expect("uri");
        assert!(cost.check_room(&store).is_ok(), "a store has its own room");
    }

    #[test]
    fn a_local_tree_is_counted_without_what_fletch_wrote() {
        let dir = tempfile::tempdir().expect("tempdir");
        std::fs::create_dir_all(dir.path().join("fletch/v1")).expect("mkdir");
        std::fs::write(dir.path().join("fletch/v1/x"), "xxx").expect("write");
        std::fs::write(dir.path().join("a"), "12345").expect("write");
        let cost = local(dir.path());
        assert_eq!((cost.files, cost.bytes, cost.is_whole), (1, 5, true));
    }
}
