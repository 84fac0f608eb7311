//! A run over 900 objects whose origin fails at request 120: no tag moves, and the next run goes on.
//!
//! The short form tries the failures that end a run at once. A call that waits for an answer does so for a
//! minute, so the others belong to the full form.

use crate::bucket::Bucket;
use crate::form::full;
use fletch_testkit::{Fault, Manners, Outage, Refusal};
use fletch_tests::user::Said;

const OBJECTS: u64 = 900;
/// The requests before the outage.
const BEFORE: u64 = 120;
/// The most objects that the next run may read again: those that were under way.
const AGAIN: u64 = 70;

fn bucket(content: &str) -> Bucket {
    let objects: Vec<(String, Vec<u8>)> =
        (0..OBJECTS).map(|i| (format!("d{}/f{i:03}", i % 9), format!("{content}{i}").into_bytes())).collect();
    Bucket::new(&Manners::default(), &objects)
}

fn refuse(status: u16, code: &str) -> Outage {
    Outage::Refuse(Refusal::new(status, code))
}

fn run(bucket: &Bucket, verb: &str) -> Said {
    bucket.read(verb, "tables", &["--skip-failed"])
}

/// Fails a run over a new bucket, then lets the same command go on.
fn fails_and_goes_on(name: &str, verb: &str, outage: Outage) {
    let bucket = bucket(name);
    bucket.origin.fail_after(BEFORE, outage);
    let said = run(&bucket, verb);
    assert!(!matches!(said.code, 0 | 3), "{name}, {verb}: {said:?}");
    assert!(bucket.entries("tables").is_err(), "{name}, {verb}: a version was written: {said:?}");
    bucket.origin.end_outage();
    bucket.origin.reset_counts();
    let said = run(&bucket, verb).ok();
    let (gets, most) = (bucket.gets(), OBJECTS - BEFORE + AGAIN);
    // The journal of a pack has whole chunks, and all of these objects are in one.
    let is_bounded = gets <= most || verb == "pack";
    assert!(is_bounded, "{name}, {verb}: {gets} objects are read again, at most {most}: {said:?}");
    assert_eq!(bucket.entries("tables").map(|all| all.len() as u64), Ok(OBJECTS), "{name}, {verb}");
}

#[test]
fn an_outage_ends_a_run_and_the_next_one_goes_on() {
    let moved = Refusal::new(301, "PermanentRedirect").with("Location", "http://127.0.0.1:9/bucket");
    let outages = [
        ("403 ExpiredToken", refuse(403, "ExpiredToken")),
        ("403 AccessDenied", refuse(403, "AccessDenied")),
        ("301", Outage::Refuse(moved)),
        ("404 of everything", refuse(404, "NoSuchKey")),
        ("400 ExpiredToken", refuse(400, "ExpiredToken")),
        ("401", refuse(401, "Unauthorized")),
        ("407", refuse(407, "ProxyAuthenticationRequired")),
        ("404 NoSuchBucket", refuse(404, "NoSuchBucket")),
    ];
    let (tried, verbs): (_, &[&str]) = if full() { (8, &["index", "pack"]) } else { (4, &["index"]) };
    for verb in verbs {
        std::thread::scope(|scope| {
            for (name, outage) in outages.iter().take(tried).cloned() {
                scope.spawn(move || fails_and_goes_on(name, verb, outage));
            }
        });
    }
}

#[test]
fn an_outage_with_retries_ends_a_run_and_the_next_one_goes_on() {
    if !full() {
        return;
    }
    std::thread::scope(|scope| {
        for (name, outage) in [
            ("500", refuse(500, "InternalError")),
            ("a closed port", Outage::ClosePort),
            ("no answer", Outage::Hang),
        ] {
            scope.spawn(move || fails_and_goes_on(name, "index", outage));
        }
    });
}

#[test]
fn the_tag_stays_at_the_version_before_the_outage() {
    let bucket = bucket("old");
    run(&bucket, "index").ok();
    let show = || bucket.user.say(&["show", &bucket.user.text("tables"), "--json"]).ok().stdout;
    let before = show();
    for i in 0..OBJECTS {
        bucket.origin.insert(&format!("set/d{}/f{i:03}", i % 9), format!("new {i}"));
    }
    bucket.origin.fail_after(BEFORE, refuse(403, "ExpiredToken"));
    for more in [
        &["--skip-failed"][..],
        &["--skip-failed", "--parent", "auto"],
        &["--skip-failed", "--allow-loss", "100%"],
    ] {
        let said = bucket.read("index", "tables", more);
        assert!(!matches!(said.code, 0 | 3), "{said:?}");
        assert_eq!(show(), before, "{said:?}");
    }
    bucket.origin.end_outage();
    run(&bucket, "index").ok();
    assert_ne!(show(), before);
    assert_eq!(bucket.entries("tables").map(|all| all.len() as u64), Ok(OBJECTS));
}

#[test]
fn one_object_that_always_fails_is_left_out() {
    let denied = Fault::Refuse(Refusal::new(403, "AccessDenied"));
    let archived = Fault::Refuse(Refusal::new(403, "InvalidObjectState"));
    let broken = Fault::Refuse(Refusal::new(500, "InternalError"));
    let faults = [denied, archived, broken, Fault::Stall];
    std::thread::scope(|scope| {
        for fault in faults.into_iter().take(if full() { 4 } else { 2 }) {
            scope.spawn(move || {
                let bucket = bucket("one");
                bucket.origin.set_fault("set/d5/f500", fault.clone(), None);
                let said = run(&bucket, "index");
                assert_eq!(said.code, 3, "{fault:?}: {said:?}");
                let paths: Vec<String> =
                    crate::bucket::faults(&said).into_iter().map(|(path, _)| path).collect();
                assert_eq!(paths, ["d5/f500"], "{fault:?}: {said:?}");
                assert_eq!(
                    bucket.entries("tables").map(|all| all.len() as u64),
                    Ok(OBJECTS - 1),
                    "{fault:?}"
                );
            });
        }
    });
}
