//! One row of the table: a bucket of some form, and what the commands must make of it.

use crate::bucket::{Bucket, faults};
use fletch_testkit::{Fault, Manners};
use fletch_tests::require::{Need, have};
use parking_lot::Mutex;
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The forms of a table that are tried at once.
const AT_ONCE: usize = 4;

/// What the commands must make of a bucket.
pub enum Want {
    /// These entries and no fault.
    Entries(Vec<String>),
    /// A fault of each of these paths. `--skip-failed` keeps these entries.
    Faults { entries: Vec<String>, faults: Vec<String> },
    /// No version, and an error with these words.
    Error(Vec<&'static str>),
}

/// A bucket of some form.
pub struct Form {
    pub name: &'static str,
    pub manners: Manners,
    /// The objects below `set/`.
    pub objects: Vec<(String, Vec<u8>)>,
    pub want: Want,
    /// Faults of the origin: of a key, and for how many requests.
    pub origin_faults: Vec<(&'static str, Fault, u32)>,
    /// Manners that the store takes on after it was indexed.
    pub later: Option<Manners>,
    /// Whether the short form of the tests mounts this bucket, too.
    pub mounts: bool,
    /// Whether the short form of the tests verifies this version, too.
    pub verifies: bool,
}

fn texts(list: &[&str]) -> Vec<String> {
    let mut all: Vec<String> = list.iter().map(|&text| text.to_owned()).collect();
    all.sort();
    all
}

/// Returns objects: a key that ends in `()` is an empty object, any other holds its own key.
pub fn objects(keys: &[&str]) -> Vec<(String, Vec<u8>)> {
    let object = |key: &&str| match key.strip_suffix("()") {
        Some(empty) => (empty.to_owned(), Vec::new()),
        None => ((*key).to_owned(), key.as_bytes().to_vec()),
    };
    keys.iter().map(object).collect()
}

impl Form {
    fn new(name: &'static str, keys: &[&str], want: Want) -> Self {
        Form {
            name,
            manners: Manners::default(),
            objects: objects(keys),
            want,
            origin_faults: Vec::new(),
            later: None,
            mounts: false,
            verifies: false,
        }
    }

    /// A bucket with these keys, which gives these entries. [`objects`] says which are empty.
    pub fn entries(name: &'static str, keys: &[&str], entries: &[&str]) -> Self {
        Form::new(name, keys, Want::Entries(texts(entries)))
    }

    /// A bucket with these keys, some of which are faults.
    pub fn faults(name: &'static str, keys: &[&str], entries: &[&str], faults: &[&str]) -> Self {
        Form::new(name, keys, Want::Faults { entries: texts(entries), faults: texts(faults) })
    }

    /// A bucket that must not give a version.
    pub fn error(name: &'static str, keys: &[&str], words: &[&'static str]) -> Self {
        Form::new(name, keys, Want::Error(words.to_vec()))
    }

    pub fn with(self, manners: Manners) -> Self {
        Form { manners, ..self }
    }

    pub fn later(self, manners: Manners) -> Self {
        Form { later: Some(manners), verifies: true, ..self }
    }

    pub fn failing(mut self, key: &'static str, fault: Fault, times: u32) -> Self {
        self.origin_faults.push((key, fault, times));
        self
    }

    pub fn mounted(self) -> Self {
        Form { mounts: true, ..self }
    }

    pub fn verified(self) -> Self {
        Form { verifies: true, ..self }
    }

    fn check(&self) {
        let bucket = Bucket::new(&self.manners, &self.objects);
        for (key, fault, times) in &self.origin_faults {
            bucket.origin.set_fault(&format!("set/{key}"), fault.clone(), Some(*times));
        }
        match &self.want {
            Want::Entries(entries) => self.is_whole(&bucket, entries),
            Want::Faults { entries, faults } => is_at_fault(&bucket, entries, faults),
            Want::Error(words) => is_refused(&bucket, words),
        }
    }

    fn is_whole(&self, bucket: &Bucket, entries: &[String]) {
        let indexed = bucket.read("index", "tables", &[]).ok();
        assert_eq!(bucket.entries("tables").as_deref(), Ok(entries), "{indexed:?}");
        if let Some(later) = &self.later {
            bucket.origin.set_manners(later.clone());
        }
        let report: Value = serde_json::from_str(&indexed.stdout).expect("JSON");
        if full() || self.verifies {
            bucket.user.say(&["verify", &bucket.user.text("tables")]).ok();
            let again = bucket.read("index", "tables", &["--parent", "auto"]).ok();
            let again: Value = serde_json::from_str(&again.stdout).expect("JSON");
            assert_eq!(again["root"], report["root"], "a second run gives another version");
        }
        if full() {
            let packed = bucket.read("pack", "packed", &[]).ok();
            let packed: Value = serde_json::from_str(&packed.stdout).expect("JSON");
            assert_eq!(packed["root"], report["root"], "a pack is another version");
        }
        if (full() || self.mounts) && have(&[Need::Fuse]) {
            bucket.origin.set_manners(self.manners.clone());
            bucket.user.mount(&bucket.uri(), "mnt", &[]);
            if let Some(later) = &self.later {
                bucket.origin.set_manners(later.clone());
            }
            assert!(bucket.mounted("mnt") == bucket.held(entries), "{:?}", bucket.mounted("mnt").keys());
            bucket.user.say(&["refresh", &bucket.uri()]).ok();
            bucket.user.mount(&bucket.uri(), "mnt2", &[]);
            assert!(bucket.mounted("mnt2") == bucket.held(entries), "{:?}", bucket.mounted("mnt2").keys());
        }
    }
}

fn is_at_fault(bucket: &Bucket, entries: &[String], wanted: &[String]) {
    let said = bucket.read("index", "tables", &["--keep-going"]);
    let paths = |list: Vec<(String, String)>| {
        let mut paths: Vec<String> = list.into_iter().map(|(path, _)| path).collect();
        paths.sort();
        paths
    };
    assert_eq!((said.code, paths(faults(&said))), (1, wanted.to_vec()), "{said:?}");
    assert!(bucket.entries("tables").is_err(), "a version was written");
    // Before a version is written: a mount shows what this account indexed, also without some entries.
    if full() && have(&[Need::Fuse]) {
        let said = bucket.user.say(&["mount", &bucket.uri(), "mnt"]);
        let named = wanted.iter().any(|path| said.stderr.contains(path.trim_end_matches('/')));
        assert!(!matches!(said.code, 0 | 3) && named, "{said:?}");
    }
    let verbs: &[&str] = if full() { &["index", "pack"] } else { &["index"] };
    for verb in verbs {
        let said = bucket.read(verb, verb, &["--skip-failed", "--allow-loss", "100%"]);
        assert_eq!((said.code, paths(faults(&said))), (3, wanted.to_vec()), "{verb}: {said:?}");
        assert_eq!(bucket.entries(verb).as_deref(), Ok(entries), "{verb}");
    }
}

fn is_refused(bucket: &Bucket, words: &[&str]) {
    let verbs: &[&str] = if full() { &["index", "pack"] } else { &["index"] };
    for verb in verbs {
        let said = bucket.read(verb, "tables", &["--skip-failed"]);
        assert!(!matches!(said.code, 0 | 3), "{verb}: {said:?}");
        let text = format!("{}{}", said.stdout, said.stderr);
        words.iter().for_each(|word| assert!(text.contains(word), "{verb}: {word:?} is not in {text}"));
        assert!(bucket.entries("tables").is_err(), "{verb}: a version was written");
    }
    if full() && have(&[Need::Fuse]) {
        let said = bucket.user.say(&["mount", &bucket.uri(), "mnt"]);
        assert!(!matches!(said.code, 0 | 3), "{said:?}");
    }
}

/// Whether every form is also verified, refreshed, packed and mounted.
pub fn full() -> bool {
    std::env::var("FLETCH_BUCKETS").is_ok_and(|value| value == "full")
}

/// Checks all forms of a table, some at once. Fails with the names of those that are wrong, and why.
#[track_caller]
pub fn check(forms: &[Form]) {
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(form) = forms.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| form.check())) {
                        let why = panic.downcast_ref::<String>().cloned();
                        let why = why.or(panic.downcast_ref::<&str>().map(|&why| why.to_owned()));
                        let why = format!("{}: {}", form.name, why.unwrap_or_default());
                        wrong.lock().push(why);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner();
    println!("{} of {} forms are right", forms.len() - wrong.len(), forms.len());
    assert!(wrong.is_empty(), "{} of {} forms are wrong:\n{}", wrong.len(), forms.len(), wrong.join("\n"));
}
