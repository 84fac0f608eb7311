use super::*;
use fletch_api::{Accounts, Allocation, DatasetUse, Info, JobLine, MountBenefit, MountState, OriginView};
use fletch_core::{DatasetName, Domain, Hash, JobName, Root, Tenant};

fn info() -> Info {
    serde_json::from_str(
        r#"{"name":"fletch-server","version":"0.1.0","uptime_s":93784,
            "formats":{"api":[1],"versions":[1],"frames":[1]},
            "limits":{"batch_items":1,"batch_bytes":1,"chunk_bytes":1},
            "disk":{"state":"on","policy":"fletch","limit_bytes":2000,"capacity_bytes":1024,
                    "chunk_bytes":512,"chunks":2}}"#,
    )
    .expect("info")
}

fn snapshot(at_s: u64) -> Snapshot {
    Snapshot {
        server: "unix:/run/fletch/server.sock".into(),
        cluster: Vec::new(),
        at_ns: at_s * 1_000_000_000,
        info: info(),
        datasets: Vec::new(),
        drafts: Vec::new(),
        accounts: Accounts::default(),
        jobs: Vec::new(),
        seen: Vec::new(),
        allocation: Allocation::default(),
        origins: Vec::new(),
        mounts: Vec::new(),
        credentials: Vec::new(),
    }
}

fn job_use(hit: u64, substituted: u64, miss: u64, stalled_ms: u64) -> fletch_api::JobUse {
    fletch_api::JobUse {
        tenant: Tenant::default_tenant(),
        job: JobName::new("train-7").expect("name"),
        dataset: DatasetName::new("images").expect("name"),
        hit_bytes: hit,
        substituted_bytes: substituted,
        miss_bytes: miss,
        bypass_bytes: 0,
        origin_bytes: miss,
        stalled_ms,
    }
}

fn full(at_s: u64) -> Snapshot {
    let mut s = snapshot(at_s);
    s.accounts.datasets = vec![DatasetUse {
        domain: Domain::default_domain(),
        dataset: DatasetName::new("images").expect("name"),
        version_bytes: Some(3 << 20),
        layout_bytes: Some(4 << 20),
        cached_bytes: Some(1 << 20),
        delivered_bytes: 2 << 20,
        origin_bytes: 1 << 20,
        avoided_bytes: 1 << 20,
        changed_objects: 0,
    }];
    s.accounts.jobs = vec![job_use(1 << 20, 512 << 10, 512 << 10, 1500)];
    let epoch = r#"{"epoch":3,"state":"open","world":{"ranks":1,"batch":1,"tail":"keep"},
        "planned":1000,"acked":421,
        "held":0,"leases":0,"redelivered":0,"padded":0,"ledger_bytes":0,
        "times":{"batches":0,"waited_ns":0,"prepared_ns":0,"stepped_ns":0}}"#;
    s.jobs = vec![JobLine {
        id: "j".into(),
        name: JobName::new("train-7").expect("name"),
        dataset: DatasetName::new("images").expect("name"),
        root: Root(Hash::of(b"r")),
        epoch: Some(serde_json::from_str(epoch).expect("epoch")),
        sweep: None,
    }];
    s.allocation = serde_json::from_str(
        r#"{"interval_s":30,"age_s":4.2,"reason":"gain","capacity_bytes":1024,"divided_bytes":1024,
            "moved_bytes":256,
            "datasets":[
              {"domain":"default","dataset":"images","is_sweep":true,"size_bytes":4096,"share_bytes":768,
               "sweep_share_bytes":512,"by_reads_bytes":512,"cached_bytes":576,"basis":"benefit",
               "rank":1,"gain_per_gib":2.0,
               "jobs":2},
              {"domain":"default","dataset":"text","is_sweep":false,"size_bytes":512,"share_bytes":256,
               "by_reads_bytes":512,"cached_bytes":64,"basis":"reads","jobs":0}],
            "jobs":[{"id":"j","name":"train-7","tenant":"default","dataset":"images","speed":0.41,
                     "verdict":"origin","ranks":1,"others":1}]}"#,
    )
    .expect("an allocation");
    s.mounts = vec![
        MountRow {
            dir: "/mnt/a".into(),
            host: "node1".into(),
            dataset: "images".into(),
            job: "eda".into(),
            dead: false,
            problem: None,
            benefit: Some(MountBenefit {
                state: MountState::Reading,
                rate: Some(3 << 20),
                most_rate: Some(12 << 20),
            }),
        },
        MountRow {
            dir: "/mnt/b".into(),
            host: "node1".into(),
            dataset: String::new(),
            job: String::new(),
            dead: true,
            problem: None,
            benefit: None,
        },
    ];
    let origin = |uri: &str, state: &str| -> OriginView {
        let why = "s3://b/x: the origin is unavailable: refused";
        serde_json::from_str(&format!(
            r#"{{"uri":"{uri}","domain":"default","datasets":["images"],"state":"{state}","requests":9,
                "failed":2,"last_error":{{"why":"{why}","at_ns":{}}}}}"#,
            (at_s - 5) * 1_000_000_000
        ))
        .expect("origin")
    };
    s.origins = vec![origin("s3://b", "failing"), origin("s3://t", "ok")];
    s.credentials = vec![CredentialRow {
        origin: "s3://b".into(),
        identity: "AKIA…7Q".into(),
        expires_ns: Some((at_s + 3700) * 1_000_000_000),
    }];
    s
}

#[test]
fn a_quiet_server_is_two_lines() {
    assert_eq!(
        screen(None, &snapshot(100)),
        "fletch-server 0.1.0 at unix:/run/fletch/server.sock, up 1day 2h: ok\n\
         disk   512 B of 1.00 KiB (50.0 %) in 2 chunks, policy fletch\n"
    );
}

#[test]
fn one_screen_says_what_is_wrong_and_what_was_saved() {
    let mut before = full(98);
    before.accounts.jobs = vec![job_use(1 << 20, 0, 0, 500)];
    let text = screen(Some(&before), &full(100));
    let want = "\
fletch-server 0.1.0 at unix:/run/fletch/server.sock, up 1day 2h: degraded
why    s3://b fails
why    the mount at /mnt/b is dead
disk   512 B of 1.00 KiB (50.0 %) in 2 chunks, policy fletch
shares last decision 4s ago: it changed the division, because jobs gain more than that costs

datasets
  DATASET      SIZE  CACHED  DELIVERED  FROM ORIGIN   AVOIDED   SAVED
  images   3.00 MiB  25.0 %   2.00 MiB     1.00 MiB  1.00 MiB  50.0 %

jobs
  JOB      DATASET  EPOCH             RATE     HIT  SHARED    MISS  FROM ORIGIN   STALL  SPEED  WAITS FOR
  train-7  images   3 at 42.1 %  512.00 KiB/s  50.0 %  25.0 %  25.0 %   512.00 KiB  50.0 %   41 %  the origin

shares of the disk
  DATASET  SHARE  SWEEP  OF DISK  FILLED   CAN USE  BY READS  JOBS  PLACE  BY
  images   768 B  512 B   75.0 %  75.0 %  4.00 KiB     512 B     2      1  worth to its jobs
  text     256 B      -   25.0 %  25.0 %     512 B     512 B     0      -  reads

mounts
  DIR     HOST   DATASET  JOB        RATE  WITHOUT WAITS        STATE
  /mnt/b  node1                         -  -                    dead
  /mnt/a  node1  images   eda  3.00 MiB/s  at most 12.00 MiB/s  ok

failing origins
  ORIGIN  CALLS  FAILED  LAST    ERROR
  s3://b      9       2  5s ago  s3://b/x: the origin is unavailable: refused

last errors of origins that work
  ORIGIN  CALLS  FAILED  LAST    ERROR
  s3://t      9       2  5s ago  s3://b/x: the origin is unavailable: refused

credentials
  ORIGIN  IDENTITY  EXPIRES
  s3://b  AKIA…7Q   in 1h 1m
";
    // Widths differ by the widest cell; the words are what counts.
    let words =
        |s: &str| s.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>();
    assert_eq!(words(&text), words(want), "{text}");
    assert!(text.lines().count() <= 40, "one screen");
}

#[test]
fn a_mount_shows_what_more_cache_can_gain_at_most() {
    let mut s = full(100);
    let mut shown = |state, most_rate: Option<u64>| {
        s.mounts[0].benefit = Some(MountBenefit { state, rate: most_rate.map(|_| 1024), most_rate });
        tables::mounts(&s).render(9).lines().last().expect("a row").to_owned()
    };
    assert!(shown(MountState::Reading, Some(4096)).contains(" 1.00 KiB/s  at most 4.00 KiB/s  ok"));
    assert!(shown(MountState::Reading, None).contains("no bound"), "a copy does nothing but read");
    assert!(shown(MountState::Kernel, None).contains(" -  no gain: page cache  ok"));
    let idle = shown(MountState::Idle, None);
    assert_eq!(idle.split_whitespace().skip(4).collect::<Vec<_>>(), ["-", "-", "ok"], "{idle}");
}

#[test]
fn the_stall_of_a_training_loop_is_what_the_loop_says() {
    let (mut before, mut now) = (full(98), full(100));
    let times = |s: &mut Snapshot, waited, stepped| {
        let epoch = s.jobs[0].epoch.as_mut().expect("an epoch");
        (epoch.times.batches, epoch.times.waited_ns, epoch.times.stepped_ns) = (1, waited, stepped);
    };
    times(&mut before, 100, 100);
    times(&mut now, 125, 175);
    let text = tables::jobs(Some(&before), &now).render(9);
    assert!(text.lines().nth(1).expect("the job").contains(" 25.0 % "), "25 of 100 ns: {text}");
    // The epoch began in between.
    before.jobs[0].epoch = None;
    let text = tables::jobs(Some(&before), &now).render(9);
    assert!(text.lines().nth(1).expect("the job").contains(" 41.6 % "), "125 of 300 ns: {text}");
}

#[test]
fn a_sweep_that_is_too_small_is_a_reason() {
    let mut s = full(100);
    s.mounts.clear();
    s.origins.clear();
    assert_eq!(health(&s).state, "ok");
    s.jobs[0].sweep = serde_json::from_str(r#"{"capacity_bytes":16,"total_bytes":1000,"unit_bytes":4}"#).ok();
    let reasons = health(&s).reasons;
    assert!(reasons[0].starts_with("job train-7: the sweep holds 4 chunks"), "{reasons:?}");
    s.jobs[0].sweep = serde_json::from_str(r#"{"capacity_bytes":20,"total_bytes":1000,"unit_bytes":4}"#).ok();
    assert_eq!(health(&s).state, "ok", "five chunks");
    s.jobs[0].sweep = serde_json::from_str(r#"{"capacity_bytes":8,"total_bytes":8,"unit_bytes":4}"#).ok();
    assert_eq!(health(&s).state, "ok", "the whole version");
    s.jobs[0].sweep = serde_json::from_str(r#"{"capacity_bytes":8,"total_bytes":16,"unit_bytes":4}"#).ok();
    assert_eq!(health(&s).state, "ok", "a version of four chunks");
}

#[test]
fn long_tables_end_and_say_so() {
    let mut table = TextTable::new(&[("N", text_table::Align::Right)]);
    (0..15).for_each(|i| table.push([i.to_string()]));
    let text = table.render(2);
    assert_eq!(text, "   N\n   0\n   1\n  … 13 more; --json has all\n".replace("   ", "  "));
    table.push(["a\u{1b}[31m".to_owned()]);
    assert!(!table.render(20).contains('\u{1b}'), "a name drives no terminal");
}

#[test]
fn parts_and_times_are_short() {
    assert_eq!((percent(1, 3), percent(0, 0), percent(5, 5)), ("33.3 %".into(), "-".into(), "100 %".into()));
    assert_eq!(span(Duration::from_secs(90_061)), "1day 1h");
    assert_eq!(span(Duration::from_millis(4900)), "4s");
}

#[test]
fn a_draft_says_how_much_of_it_is_known() {
    let mut s = snapshot(100);
    assert!(!screen(None, &s).contains("drafts"));
    s.drafts = vec![fletch_api::Draft {
        dataset: DatasetName::new("images").expect("name"),
        root: fletch_core::Root(fletch_core::Hash::of(b"draft")),
        listed_ns: 40_000_000_000,
        files: 2_000,
        bytes: 4 << 20,
        known_files: 400,
        known_bytes: 1 << 20,
    }];
    let text = screen(None, &s);
    let row = text.lines().skip_while(|line| *line != "drafts").nth(2).expect("a row");
    let words: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(words, ["images", "2000", "25.0", "%", "4.00", "MiB", "1m", "ago"], "{text}");
}

#[test]
fn a_changed_object_is_one_sentence_and_no_bad_health() {
    let mut s = full(0);
    assert!(!screen(None, &s).contains("changed since"));
    for (n, words) in [(1, "1 object changed"), (2, "2 objects changed")] {
        s.accounts.datasets[0].changed_objects = n;
        let line = format!("note   {words} since the index: `fletch refresh images`\n");
        let text = screen(None, &s);
        assert!(text.contains(&line), "{text}");
        assert_eq!(health(&s).state, health(&full(0)).state);
    }
}
