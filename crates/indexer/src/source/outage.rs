//! Tells a fault of one object from an outage of its origin.
//!
//! An object that cannot be read may be left out of a version. An origin that is away must not empty the
//! version: its outage ends the run. Both look alike to one call: a 403 can be about one object, or the token
//! has expired.
//!
//! So a failure is a fault of its object only after another object could be read, by a call that began after
//! the failure. The other object is the *witness*: one that this run has read or listed.
//!
//! ```text
//! a read fails ─→ says it by itself (changed; expired; no such bucket) ─→ fault, or outage
//!              └→ read the first byte of the witness ─→ read: fault; not read: outage
//!              └→ no witness yet: fault, unless none is found until the end, or UNPROVEN_MAX of them
//! ```

use crate::failure::{Exit, Failure};
use fletch_origin::{Origin, OriginError};
use parking_lot::Mutex;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use tokio::time::Instant;

/// The most faults before any object could be read.
const UNPROVEN_MAX: usize = 64;

/// An object that could be read.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Witness {
    path: String,
    size: u64,
}

#[derive(Debug, Default)]
struct Seen {
    /// The last object that was read.
    read: Option<Witness>,
    /// An object that an earlier run has read, and that is unchanged in the listing.
    unchanged: Option<Witness>,
    /// Faults without a witness, and the error of the first one.
    unproven: usize,
    first: Option<OriginError>,
}

/// Judges the failed reads of one run.
#[derive(Debug)]
pub struct OutageJudge<'a> {
    origin: &'a Origin,
    /// For a local directory: the directory, as it was when the run began.
    base: Option<&'a BaseDir>,
    seen: Mutex<Seen>,
    /// When the last successful read of a witness began, or the outage that a read showed. The lock lets one
    /// caller ask for all: after an outage nobody asks again.
    asked: tokio::sync::Mutex<Option<Result<Instant, Failure>>>,
}

impl<'a> OutageJudge<'a> {
    /// Judges reads of `origin`. `base` is its directory if it is a local one.
    #[must_use]
    pub fn new(origin: &'a Origin, base: Option<&'a BaseDir>) -> Self {
        OutageJudge { origin, base, seen: Mutex::default(), asked: tokio::sync::Mutex::new(None) }
    }

    /// Notes an object that was read.
    pub fn read(&self, path: &str, size: u64) {
        let mut seen = self.seen.lock();
        // An empty object shows less: nothing of it is read.
        if size > 0 || seen.read.is_none() {
            seen.read = Some(Witness { path: path.to_owned(), size });
        }
    }

    /// Notes an object that an earlier run has read and that looks the same in the listing.
    pub fn unchanged(&self, path: &str, size: u64) {
        let mut seen = self.seen.lock();
        if seen.unchanged.is_none() && size > 0 {
            seen.unchanged = Some(Witness { path: path.to_owned(), size });
        }
    }

    /// Returns why an object is at fault.
    ///
    /// # Errors
    /// The [`Failure`] of the run if the origin is at fault.
    pub async fn judge(&self, error: OriginError) -> Result<String, Failure> {
        let failed = Instant::now();
        match &error {
            OriginError::Changed { .. } => {
                return Ok(
                    "it changed during the run; stop the program that writes to it and run again".into()
                );
            }
            // An origin that asks to slow down answers, so the witness decides.
            OriginError::Throttled { .. } => {}
            of_origin if of_origin.is_of_origin() => return Err(outage(error)),
            _ => {}
        }
        if let Some(base) = self.base {
            // A local call fails in this way with an error of the file system, or after a hang.
            let is_away = matches!(error, OriginError::Unavailable { .. });
            return if is_away { Err(outage(error)) } else { base.check().map(|()| error.to_string()) };
        }
        let witness = {
            let mut seen = self.seen.lock();
            let witness = seen.read.as_ref().or(seen.unchanged.as_ref()).cloned();
            if witness.is_none() {
                seen.unproven += 1;
                seen.first.get_or_insert_with(|| error.clone());
                return if seen.unproven > UNPROVEN_MAX { Err(outage(error)) } else { Ok(error.to_string()) };
            }
            witness
        };
        let mut asked = self.asked.lock().await;
        match &*asked {
            Some(Ok(begun)) if *begun >= failed => return Ok(error.to_string()),
            Some(Err(outage)) => return Err(outage.clone()),
            _ => {}
        }
        let begun = Instant::now();
        let failure = match self.ask(witness).await {
            Ok(()) => {
                *asked = Some(Ok(begun));
                return Ok(error.to_string());
            }
            // The error of the object says more if it is of the same kind.
            Err(of_witness) if of_witness.kind() == error.kind() => outage(error),
            Err(of_witness) => outage(of_witness),
        };
        *asked = Some(Err(failure.clone()));
        Err(failure)
    }

    /// Reads a byte of the witness.
    async fn ask(&self, witness: Option<Witness>) -> Result<(), OriginError> {
        let Some(Witness { path, size }) = witness else { return Ok(()) };
        match size {
            0 => self.origin.head(&path).await.map(drop),
            _ => self.origin.get(&path, Some(0..1), None).await.map(drop),
        }
    }

    /// Checks at the end of a run that its faults have a witness.
    ///
    /// # Errors
    /// The [`Failure`] of the run if no object could be read.
    pub fn finish(&self) -> Result<(), Failure> {
        if let Some(base) = self.base {
            return base.check();
        }
        let mut seen = self.seen.lock();
        match seen.first.take() {
            Some(first) if seen.read.is_none() && seen.unchanged.is_none() => Err(outage(first)),
            _ => Ok(()),
        }
    }
}

/// Returns the failure of a run whose origin is away.
fn outage(error: OriginError) -> Failure {
    let exit = match error {
        OriginError::Denied { .. } | OriginError::Expired { .. } => Exit::Denied,
        _ => Exit::Unreachable,
    };
    let failure = Failure::from(error);
    Failure { exit, hint: Some(hint(failure.hint)), ..failure }
}

fn hint(more: Option<String>) -> String {
    let again = "no object was left out for it, and no version was written; when the origin works again, the \
                 same command goes on where it stopped";
    more.map_or(again.to_owned(), |more| format!("{more}; {again}"))
}

/// The directory of a local dataset, and how to recognise it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseDir {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl BaseDir {
    /// Remembers a directory.
    ///
    /// # Errors
    /// When it cannot be looked up.
    pub fn of(path: &Path) -> io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        Ok(BaseDir { path: path.to_owned(), device: meta.dev(), inode: meta.ino() })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the directory is still the one that it was: nothing was unmounted or put in its place.
    ///
    /// # Errors
    /// The [`Failure`] of the run.
    pub fn check(&self) -> Result<(), Failure> {
        let shown = self.path.display();
        match BaseDir::of(&self.path) {
            Ok(now) if now == *self => Ok(()),
            Ok(_) => Err(Failure::new(format!(
                "the dataset {shown} is another directory than when the run began: its file system was \
                 mounted or unmounted, or the directory was replaced"
            ))
            .hint(hint(None))
            .exit(Exit::Unreachable)),
            Err(e) => Err(directory_outage(&self.path, &e)),
        }
    }
}

/// Whether an error of the operating system says that a file system fails, and not one file of it.
#[must_use]
pub fn is_outage(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::EIO
                | libc::ENOTCONN
                | libc::ESTALE
                | libc::ENODEV
                | libc::ENXIO
                | libc::EREMOTEIO
                | libc::ETIMEDOUT
                | libc::EHOSTDOWN
                | libc::EHOSTUNREACH
                | libc::ECONNABORTED
                | libc::ECONNRESET
                | libc::ECONNREFUSED
                | libc::ESHUTDOWN
        )
    )
}

/// Returns the failure of a run at a path whose file system fails.
#[must_use]
pub fn directory_outage(path: &Path, error: &io::Error) -> Failure {
    let why = match error.raw_os_error() {
        Some(libc::ENOTCONN) => " (the process behind this mount is gone: unmount it and mount it again)",
        Some(libc::ESTALE) => " (the server of this network file system has replaced it: mount it again)",
        Some(libc::EIO) => " (the disk or the file system is failing: see the kernel's log)",
        _ => "",
    };
    Failure::new(format!("cannot read {}: {error}{why}", path.display()))
        .hint(hint(None))
        .exit(Exit::Unreachable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_origin::{OriginLimits, OriginUri, Origins};

    #[test]
    fn a_directory_that_was_replaced_is_an_outage() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("data");
        std::fs::create_dir(&path).expect("mkdir");
        let base = BaseDir::of(&path).expect("there");
        assert!(base.check().is_ok());
        std::fs::rename(&path, dir.path().join("moved")).expect("renamed");
        assert_eq!(base.check().expect_err("gone").exit, Exit::Unreachable);
        std::fs::create_dir(&path).expect("mkdir");
        let replaced = base.check().expect_err("another directory");
        assert!(replaced.what.contains("another directory"), "{replaced}");
    }

    #[test]
    fn errors_of_a_file_system_are_told_from_errors_of_a_file() {
        let is = |errno| is_outage(&io::Error::from_raw_os_error(errno));
        for errno in [libc::EIO, libc::ENOTCONN, libc::ESTALE, libc::ETIMEDOUT] {
            assert!(is(errno), "{errno}");
        }
        for errno in [libc::EACCES, libc::ENOENT, libc::ELOOP, libc::ENAMETOOLONG, libc::EISDIR] {
            assert!(!is(errno), "{errno}");
        }
    }

    #[tokio::test]
    async fn without_a_witness_a_few_faults_are_believed_until_the_end() {
        let origins = Origins::new(Vec::new(), OriginLimits::default()).expect("right");
        let origin = origins.open(&OriginUri::parse("/none").expect("uri")).expect("open");
        let denied =
            || OriginError::Denied { what: "x".into(), why: "status 403".into(), is_of_origin: false };
        let judge = OutageJudge::new(&origin, None);
        for _ in 0..UNPROVEN_MAX {
            assert!(judge.judge(denied()).await.is_ok());
        }
        let failure = judge.judge(denied()).await.expect_err("too many");
        assert_eq!(failure.exit, Exit::Denied);
        assert!(failure.hint.as_deref().is_some_and(|h| h.contains("no object was left out")), "{failure}");
        let judge = OutageJudge::new(&origin, None);
        assert!(judge.judge(denied()).await.is_ok());
        assert!(judge.finish().is_err(), "nothing could be read");
        let judge = OutageJudge::new(&origin, None);
        assert!(judge.judge(denied()).await.is_ok());
        judge.read("other", 1);
        assert!(judge.finish().is_ok());
        // What an error says by itself needs no witness.
        let gone = OriginError::NoBucket { what: "x".into(), why: "status 404".into() };
        assert!(judge.judge(gone).await.is_err());
        let changed = OriginError::Changed { what: "x".into(), why: "etag".into() };
        assert!(judge.judge(changed).await.is_ok());
    }

    #[tokio::test]
    async fn after_an_outage_nobody_asks_the_witness_again() {
        let dir = tempfile::tempdir().expect("tempdir");
        let origins = Origins::new(Vec::new(), OriginLimits::default()).expect("right");
        let uri = OriginUri::parse(&dir.path().display().to_string()).expect("uri");
        let origin = origins.open(&uri).expect("open");
        let denied =
            || OriginError::Denied { what: "x".into(), why: "status 403".into(), is_of_origin: false };
        let judge = OutageJudge::new(&origin, None);
        judge.read("witness", 1);
        assert!(judge.judge(denied()).await.is_err(), "the witness is away");
        // A waiter that asked now would find it, and would leave its own object out.
        std::fs::write(dir.path().join("witness"), "w").expect("write");
        assert!(judge.judge(denied()).await.is_err(), "the run has ended");
        // Of another run, it is a fault of the object.
        let judge = OutageJudge::new(&origin, None);
        judge.read("witness", 1);
        assert!(judge.judge(denied()).await.is_ok());
    }
}
