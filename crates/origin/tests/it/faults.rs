use crate::{config, limits, names, origins, uri};
use bytes::Bytes;
use fletch_origin::{Credentials, Origin, OriginConfig, OriginError, OriginLimits, Origins, PutMode};
use fletch_testkit::{Backing, EmulatorConfig, Fault, Latency, OriginEmulator, dataset};
use std::time::{Duration, Instant};

const SIZE: u64 = 200_000;

/// Returns an emulator with the object `x`, and an origin there with this deadline.
fn setup(io_timeout_ms: u64) -> (OriginEmulator, Origins, Origin, Vec<u8>) {
    let emulator = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    let bytes = dataset::content(5, 5, SIZE);
    emulator.insert("x", bytes.clone());
    let origins = origins(&emulator, limits(io_timeout_ms));
    let origin = origins.open(&uri(&emulator.uri())).expect("open");
    (emulator, origins, origin, bytes)
}

/// Returns the result of a call, and asserts that the call ended within its deadline plus half a second.
async fn within<T>(io_timeout_ms: u64, call: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let result = call.await;
    assert!(began.elapsed() < Duration::from_millis(io_timeout_ms + 500), "{:?}", began.elapsed());
    result
}

#[tokio::test]
async fn transient_faults_are_retried() {
    for fault in [
        Fault::Error { rate: 1.0, status: 500 },
        Fault::Error { rate: 1.0, status: 502 },
        Fault::SlowDown { retry_after_s: None },
        Fault::SlowDown { retry_after_s: Some(0) },
        Fault::Truncate { after: 0 },
        Fault::Truncate { after: 70_000 },
    ] {
        let (emulator, origins, origin, bytes) = setup(10_000);
        emulator.set_fault("x", fault.clone(), Some(2));
        let got = origin.get("x", None, None).await.expect("the third attempt");
        assert!(got.bytes == bytes, "{fault:?}");
        assert_eq!(emulator.counts().get, 3, "{fault:?}");
        let stats = origins.stats();
        assert_eq!((stats.requests, stats.retries), (3, 2), "{fault:?}");
        assert_eq!(stats.unavailable + stats.throttled, 0, "a call that succeeds is no error");
        if let Fault::Error { .. } | Fault::SlowDown { .. } = fault {
            emulator.set_fault("", fault, Some(1));
            assert_eq!(names(&origin, "").await, ["x"], "a listing page is retried");
        }
    }
}

#[tokio::test]
async fn a_stall_costs_a_third_of_the_deadline() {
    for fault in [Fault::Stall, Fault::StallAfter(0), Fault::StallAfter(100_000)] {
        let (emulator, _, origin, bytes) = setup(1_500);
        emulator.set_fault("x", fault.clone(), Some(1));
        let got = within(1_500, origin.get("x", Some(0..SIZE), None)).await;
        assert!(got.expect("the second attempt").bytes == bytes, "{fault:?}");
        emulator.set_fault("x", fault.clone(), None);
        let error = within(1_500, origin.get("x", None, None)).await.expect_err("stalled for ever");
        assert!(matches!(error, OriginError::Unavailable { .. }), "{fault:?}: {error:?}");
    }
    let (emulator, _, origin, _) = setup(900);
    emulator.set_fault("", Fault::Stall, None);
    within(900, origin.head("x")).await.expect_err("stalled");
    within(900, origin.delete("x")).await.expect_err("stalled");
    within(900, origin.put("y", Bytes::new(), PutMode::Create)).await.expect_err("stalled");
    let mut listing = origin.list("");
    within(900, futures::StreamExt::next(&mut listing)).await.expect("an item").expect_err("stalled");
}

#[tokio::test]
async fn each_fault_has_its_kind_and_ends_in_time() {
    type Check = fn(&OriginError) -> bool;
    let cases: [(Fault, Check, u64); 9] = [
        (Fault::Error { rate: 1.0, status: 500 }, |e| matches!(e, OriginError::Unavailable { .. }), 0),
        (Fault::Error { rate: 1.0, status: 403 }, |e| matches!(e, OriginError::Denied { .. }), 1),
        (Fault::Error { rate: 1.0, status: 401 }, |e| matches!(e, OriginError::Denied { .. }), 1),
        (Fault::Error { rate: 1.0, status: 400 }, |e| matches!(e, OriginError::Invalid { .. }), 1),
        (Fault::Error { rate: 1.0, status: 404 }, |e| matches!(e, OriginError::NotFound { .. }), 1),
        (Fault::Truncate { after: 50_000 }, |e| matches!(e, OriginError::Unavailable { .. }), 0),
        (Fault::Short { by: 1 }, |e| matches!(e, OriginError::WrongAnswer { .. }), 1),
        (Fault::IgnoreRange, |e| matches!(e, OriginError::WrongAnswer { .. }), 1),
        (Fault::ShiftRange(1), |e| matches!(e, OriginError::WrongAnswer { .. }), 1),
    ];
    for (fault, check, requests) in cases {
        let (emulator, origins, origin, _) = setup(3_000);
        emulator.set_fault("x", fault.clone(), None);
        let error = within(3_000, origin.get("x", Some(10..100_010), None)).await.expect_err("a fault");
        assert!(check(&error), "{fault:?}: {error:?}");
        let asked = emulator.counts().get;
        assert!(if requests == 0 { asked > 1 } else { asked == requests }, "{fault:?}: {asked} requests");
        let sent = origins.stats().requests;
        // The deadline may cut off the last retry.
        assert!(sent == asked || requests == 0 && sent == asked + 1, "{fault:?}: {sent} sent, {asked} came");
        emulator.clear_faults();
        origin.get("x", None, None).await.expect("well again");
    }
}

#[tokio::test]
async fn a_pinned_object_is_not_mixed_with_another() {
    let (emulator, _, origin, bytes) = setup(2_000);
    let pin = origin.head("x").await.expect("head").pin();
    emulator.set_fault("x", Fault::ChangeEtag, None);
    let error = origin.get("x", Some(0..10), Some(&pin)).await.expect_err("another etag");
    assert!(matches!(error, OriginError::Changed { .. }), "{error:?}");
    emulator.clear_faults();
    // The whole object, one byte short, with a matching Content-Length.
    emulator.set_fault("x", Fault::Short { by: 1 }, Some(1));
    let error = origin.get("x", None, Some(&pin)).await.expect_err("short");
    assert!(matches!(error, OriginError::WrongAnswer { .. }), "the etag is that of the pin: {error:?}");
    // A refusal is not a changed object, whatever the pin says.
    emulator.set_fault("x", Fault::Error { rate: 1.0, status: 400 }, Some(1));
    let error = origin.get("x", Some(0..10), Some(&pin)).await.expect_err("refused");
    assert!(matches!(error, OriginError::Invalid { .. }), "{error:?}");
    emulator.set_fault("x", Fault::FlipBit { byte: 77 }, Some(1));
    let got = origin.get("x", None, Some(&pin)).await.expect("a lie that only a hash can see").bytes;
    let wrong: Vec<usize> = (0..bytes.len()).filter(|i| got[*i] != bytes[*i]).collect();
    assert_eq!((wrong.as_slice(), got[77] ^ bytes[77]), ([77].as_slice(), 1));
}

#[tokio::test]
async fn a_request_to_slow_down_is_honoured() {
    let (emulator, origins, origin, _) = setup(10_000);
    emulator.set_fault("x", Fault::SlowDown { retry_after_s: Some(1) }, Some(1));
    let began = Instant::now();
    origin.get("x", None, None).await.expect("after a second");
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    emulator.set_fault("x", Fault::SlowDown { retry_after_s: Some(60) }, None);
    let error = within(0, origin.get("x", None, None)).await.expect_err("longer than there is time");
    let asked = Some(Duration::from_secs(60));
    assert!(
        matches!(&error, OriginError::Throttled { retry_after, .. } if *retry_after == asked),
        "{error:?}"
    );
    assert_eq!(origins.stats().throttled, 1);
}

#[tokio::test]
async fn a_request_cap_slows_readers_and_fails_none() {
    let config_of = EmulatorConfig { rps_cap: Some(50), retry_after_s: 0, ..EmulatorConfig::default() };
    let emulator = OriginEmulator::start(config_of, Backing::empty());
    emulator.insert("x", "1");
    let limits = OriginLimits { attempts_max: 100, ..limits(20_000) };
    let origins = origins(&emulator, limits);
    let origin = origins.open(&uri(&emulator.uri())).expect("open");
    let gets = (0..60).map(|_| origin.get("x", None, None));
    for got in futures::future::join_all(gets).await {
        got.expect("in the end");
    }
    let counts = emulator.counts();
    assert_eq!(counts.get - counts.refused, 60);
    assert_eq!(origins.stats().retries, counts.refused);
}

#[tokio::test]
async fn an_answer_that_was_lost_does_not_make_a_create_fail() {
    let (emulator, _, origin, _) = setup(2_000);
    emulator.set_fault("tag", Fault::LoseAnswer, Some(1));
    origin.put("tag", Bytes::from_static(b"mine"), PutMode::Create).await.expect("it is ours");
    emulator.set_fault("tag", Fault::Error { rate: 1.0, status: 500 }, Some(1));
    let error =
        origin.put("tag", Bytes::from_static(b"yours"), PutMode::Create).await.expect_err("it is another's");
    assert!(matches!(error, OriginError::AlreadyExists { .. }), "{error:?}");
    assert_eq!(emulator.object("tag").as_deref(), Some(b"mine".as_slice()));
}

#[tokio::test]
async fn a_failed_upload_is_not_seen_and_is_removed() {
    let (emulator, _, origin, _) = setup(1_500);
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("f");
    let bytes = dataset::content(6, 6, 20 << 20);
    std::fs::write(&file, &bytes).expect("written");
    emulator.set_fault("big", Fault::Error { rate: 1.0, status: 500 }, Some(2));
    origin.put_file("big", &file, PutMode::Overwrite).await.expect("parts are sent again");
    assert!(emulator.object("big").expect("there") == bytes);
    emulator.set_fault("other", Fault::Error { rate: 1.0, status: 403 }, None);
    let error = origin.put_file("other", &file, PutMode::Overwrite).await.expect_err("refused");
    assert!(matches!(error, OriginError::Denied { .. }), "{error:?}");
    assert_eq!(emulator.object("other"), None);
}

#[tokio::test]
async fn counters_agree_with_the_origins_own() {
    let (emulator, origins, origin, _) = setup(10_000);
    for i in 0..20 {
        origin.get("x", Some(i * 1000..i * 1000 + 500), None).await.expect("read");
        origin.head("x").await.expect("head");
        origin.put(&format!("y/{i}"), Bytes::from_static(b"12345"), PutMode::Create).await.expect("put");
    }
    names(&origin, "y").await;
    origin.delete("y/3").await.expect("deleted");
    origin.get("none", None, None).await.expect_err("missing");
    let (counts, stats) = (emulator.counts(), origins.stats());
    assert_eq!((counts.get, counts.head, counts.list), (21, 20, 1));
    // Two more writes and a delete: the probe for conditional creates ran once.
    assert_eq!((counts.put, counts.delete), (22, 2));
    assert_eq!(counts.gets, [("none".to_owned(), 1), ("x".to_owned(), 20)].into());
    assert_eq!(stats.requests, counts.requests());
    assert_eq!((stats.bytes_read, stats.bytes_written), (10_000, 100));
    assert_eq!((counts.bytes_sent, counts.refused, stats.not_found), (10_000, 2, 1));
}

#[tokio::test]
async fn calls_wait_for_a_permit_but_not_for_ever() {
    let first_byte = Some(Latency { median: Duration::from_millis(100), p99: Duration::from_millis(100) });
    let emulator =
        OriginEmulator::start(EmulatorConfig { first_byte, ..EmulatorConfig::default() }, Backing::empty());
    emulator.insert("x", "1");
    let limits = OriginLimits { requests_max: 2, ..limits(5_000) };
    let origin = origins(&emulator, limits).open(&uri(&emulator.uri())).expect("open");
    let began = Instant::now();
    for got in futures::future::join_all((0..8).map(|_| origin.get("x", None, None))).await {
        got.expect("in its turn");
    }
    assert!(began.elapsed() >= Duration::from_millis(400), "8 calls, 2 at once: {:?}", began.elapsed());
    emulator.set_fault("x", Fault::Stall, None);
    let limits = OriginLimits { requests_max: 1, ..crate::limits(900) };
    let origin = origins(&emulator, limits).open(&uri(&emulator.uri())).expect("open");
    let all = futures::future::join_all((0..4).map(|_| origin.get("x", None, None)));
    for got in within(900, all).await {
        assert!(matches!(got, Err(OriginError::Unavailable { .. })), "{got:?}");
    }
}

#[tokio::test]
async fn an_origin_that_is_gone_is_unavailable() {
    let (emulator, _, origin, _) = setup(1_000);
    drop(emulator);
    let error = within(1_000, origin.get("x", None, None)).await.expect_err("gone");
    assert!(matches!(error, OriginError::Unavailable { .. }), "{error:?}");
}

#[tokio::test]
async fn the_longest_prefix_wins_and_stores_are_not_guessed() {
    let one = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    let two = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    two.insert("special/x", "from two");
    one.insert("special/x", "from one");
    one.insert("specialist/x", "from one");
    let special = OriginConfig { prefix: "s3://bucket/special".to_owned(), ..config(&two) };
    let origins = Origins::new(vec![config(&one), special], limits(5_000)).expect("right");
    for (place, text) in [("s3://bucket/special", "from two"), ("s3://bucket/specialist", "from one")] {
        let origin = origins.open(&uri(place)).expect("open");
        assert_eq!(origin.get("x", None, None).await.expect("read").bytes, text);
    }
    assert!(origins.is_configured(&uri("s3://bucket/any/where")));
    assert!(!origins.is_configured(&uri("s3://other")) && !origins.is_configured(&uri("/etc")));
    let error = origins.open(&uri("s3://other/x")).expect_err("not configured");
    assert!(
        matches!(&error, OriginError::Invalid { .. }) && error.to_string().contains("[[origin]]"),
        "{error}"
    );
}

#[tokio::test]
async fn secrets_sign_requests_and_are_never_shown() {
    let (emulator, ..) = setup(1_000);
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("credentials");
    std::fs::write(
        &file,
        "[default]\naws_access_key_id = AKIAKEY\naws_secret_access_key = hunter2\n\
         aws_session_token = tok3n\n",
    )
    .expect("written");
    let signed = OriginConfig { credentials: Some(Credentials::File(file)), ..config(&emulator) };
    let shown = format!("{signed:?}");
    let origins = Origins::new(vec![signed], limits(1_000)).expect("right");
    let origin = origins.open(&uri(&emulator.uri())).expect("open");
    origin.get("x", None, None).await.expect("read");
    emulator.set_fault("x", Fault::Error { rate: 1.0, status: 403 }, None);
    let error = origin.get("x", None, None).await.expect_err("denied");
    assert!(error.to_string().contains("AccessDenied"), "{error}");
    let all = format!("{shown} {error} {error:?} {origin:?} {origins:?}");
    for secret in ["AKIAKEY", "hunter2", "tok3n", "Signature"] {
        assert!(!all.contains(secret), "{secret} in {all}");
    }
}

#[tokio::test]
async fn a_server_that_ignores_conditions_is_detected_before_the_first_create() {
    let (emulator, _, origin, _) = setup(5_000);
    emulator.set_fault("", Fault::IgnoreConditions, None);
    let create =
        |bytes: &'static str| origin.put("tag", Bytes::from_static(bytes.as_bytes()), PutMode::Create);
    create("mine").await.expect("there was none");
    let error = create("yours").await.expect_err("it is there");
    assert!(matches!(error, OriginError::AlreadyExists { .. }), "{error:?}");
    assert_eq!(emulator.object("tag").as_deref(), Some(b"mine".as_slice()));
    let puts = emulator.counts().put;
    create("theirs").await.expect_err("it is there");
    assert_eq!(emulator.counts().put, puts, "one probe; later creates check first");
    assert_eq!(names(&origin, "").await, ["tag", "x"], "the probe object is deleted");
}

#[tokio::test]
async fn rotated_credentials_take_effect_without_a_failure() {
    let (emulator, ..) = setup(5_000);
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("credentials");
    let text =
        |n: u32| format!("[default]\naws_access_key_id = AKIA{n}\naws_secret_access_key = hunter{n}\n");
    std::fs::write(&file, text(1)).expect("written");
    let signed = OriginConfig { credentials: Some(Credentials::File(file.clone())), ..config(&emulator) };
    let origins = Origins::new(vec![signed], limits(5_000)).expect("right");
    let origin = origins.open(&uri(&emulator.uri())).expect("open");
    origin.get("x", None, None).await.expect("read");
    // The server rejects the old key from now on, and the file has a new one, swapped as secrets are.
    emulator.set_fault("x", Fault::Error { rate: 1.0, status: 403 }, Some(1));
    std::fs::write(dir.path().join("new"), text(2)).expect("written");
    std::fs::rename(dir.path().join("new"), &file).expect("swapped");
    origin.get("x", None, None).await.expect("read with the new key, at once");
    assert_eq!(origins.stats().credentials_read, 1);
    // Another rejection with an unchanged file: the call fails after one request.
    emulator.set_fault("x", Fault::Error { rate: 1.0, status: 403 }, None);
    let asked = emulator.counts().get;
    let error = origin.get("x", None, None).await.expect_err("denied");
    assert!(matches!(error, OriginError::Denied { .. }), "{error:?}");
    assert_eq!(emulator.counts().get, asked + 1);
    // A half written file leaves the old credentials in use.
    emulator.clear_faults();
    std::fs::write(&file, "[default]\naws_access_key_id = AKIA3\n").expect("written");
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    origin.get("x", None, None).await.expect("the old ones");
    std::fs::write(&file, text(3)).expect("written");
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    origin.get("x", None, None).await.expect("the new ones, without a refusal");
    assert_eq!(origins.stats().credentials_read, 2);
}

/// The origin answers 500 requests a second, and all others with `503` and `Retry-After: 1`.
///
/// `pace::tests` asserts nine tenths of that rate in virtual time. This test asserts it only in `make soak`,
/// which has the machine to itself: a real clock on a busy machine says nothing about the limiter. It then
/// runs for 45 s, because two refusals at the start cost two seconds in any case.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_origin_capped_at_500_requests_a_second_is_used_to_nine_tenths() {
    const CAP: u32 = 500;
    let soak = std::env::var_os("FLETCH_SOAK").is_some();
    let (seconds, goodput_min) = if soak { (45, 0.9) } else { (10, 0.0) };
    let shape = EmulatorConfig { rps_cap: Some(CAP), retry_after_s: 1, ..EmulatorConfig::default() };
    let emulator = OriginEmulator::start(shape, Backing::empty());
    emulator.insert("x", vec![7; 4096]);
    let origins = origins(&emulator, limits(30_000));
    let origin = origins.open(&uri(&emulator.uri())).expect("open");
    let began = Instant::now();
    let reader = async || {
        let mut read = 0u64;
        while began.elapsed() < Duration::from_secs(seconds) {
            origin.get("x", None, None).await.expect("no error is seen by any reader");
            read += 1;
        }
        read
    };
    let read: u64 = futures::future::join_all((0..64).map(|_| reader())).await.into_iter().sum();
    let (asked, cap) = (emulator.counts().get, f64::from(CAP) * began.elapsed().as_secs_f64());
    let (goodput, requests) = (read as f64 / cap, asked as f64 / cap);
    let shown =
        format!("goodput {goodput:.3}, requests {requests:.3} of the cap, {} pauses", origins.stats().pauses);
    eprintln!("{shown}");
    assert!(read > 0 && goodput >= goodput_min && requests <= 1.15, "{shown}");
    assert_eq!(emulator.counts().early, 0, "requests that began before Retry-After was over");
    assert_eq!(origins.stats().throttled + origins.stats().unavailable, 0);
}

#[tokio::test]
async fn rates_of_one_origin_are_kept_and_do_not_slow_another() {
    let (fast, slow) = (setup(10_000), setup(10_000));
    let limited = OriginConfig {
        prefix: "s3://bucket/slow".to_owned(),
        requests_per_second: Some(20),
        concurrency: Some(2),
        ..config(&slow.0)
    };
    slow.0.insert("slow/x", "1");
    let origins = Origins::new(vec![limited, config(&fast.0)], limits(10_000)).expect("right");
    let slow = origins.open(&uri("s3://bucket/slow")).expect("open");
    let fast = origins.open(&uri("s3://bucket")).expect("open");
    let began = Instant::now();
    let slowed = async {
        for got in futures::future::join_all((0..30).map(|_| slow.get("x", None, None))).await {
            got.expect("in its turn");
        }
        began.elapsed()
    };
    let free = async {
        for got in futures::future::join_all((0..30).map(|_| fast.get("x", None, None))).await {
            got.expect("at once");
        }
        began.elapsed()
    };
    let (slowed, free) = tokio::join!(slowed, free);
    assert!(slowed >= Duration::from_millis(1_400), "30 at 20 a second took {slowed:?}");
    assert!(free < slowed, "{free:?}");
}

#[tokio::test]
async fn origins_that_hang_leave_calls_for_others_and_the_error_names_them_and_the_setting() {
    let emulator = |bucket: &str| {
        let config = EmulatorConfig { bucket: bucket.to_owned(), ..EmulatorConfig::default() };
        let emulator = OriginEmulator::start(config, Backing::empty());
        emulator.insert("x", "1");
        emulator
    };
    let (hangs, too, works) = (emulator("hangs"), emulator("too"), emulator("works"));
    // The first one takes 12, and the second 3 of the other 4.
    let limits = OriginLimits { requests_max: 16, requests_per_origin: Some(12), ..limits(2_000) };
    let configs = vec![config(&hangs), config(&too), config(&works)];
    let origins = Origins::new(configs, limits).expect("right");
    let open = |emulator: &OriginEmulator| origins.open(&uri(&emulator.uri())).expect("open");
    hangs.set_fault("", Fault::Stall, None);
    too.set_fault("", Fault::Stall, None);
    let (hanging, second, working) = (open(&hangs), open(&too), open(&works));
    let all = (0..24).map(|n| if n < 16 { &hanging } else { &second });
    // A read that brings no byte would lose its permit to one that waits.
    let write = |origin: &Origin| {
        let origin = origin.clone();
        async move { origin.put("x", Bytes::new(), PutMode::Overwrite).await }
    };
    let stuck = futures::future::join_all(all.map(write));
    let other = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        for _ in 0..10 {
            within(500, working.get("x", None, None)).await.expect("read");
        }
    };
    let (stuck, ()) = tokio::join!(stuck, other);
    let errors: Vec<String> = stuck.into_iter().map(|got| got.expect_err("hangs").to_string()).collect();
    for name in ["hangs", "too"] {
        let turn = format!("for its turn at s3://{name}: ");
        let waited = errors.iter().find(|e| e.contains(&turn)).expect("waited");
        assert!(waited.contains("limits.origin_requests_per_origin"), "{waited}");
        assert!(waited.contains("waited 2.") && waited.contains("other calls to the same"), "{waited}");
    }
}
