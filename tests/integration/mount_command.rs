//! `fletch mount`, `refresh` and `down`: one command from a source to files, with a server of the user's own.
//!
//! Each test has its own home, runtime directory and machine id, so it meets no other server.

use fletch_origin::{Credentials, Origin, OriginConfig, OriginLimits, OriginUri, Origins, PutMode};
use fletch_testkit::servers;
use fletch_tests::bins::{bin_dir, command, repo};
use fletch_tests::fixture::{files, is_mounted};
use fletch_tests::require::{Need, have};
use fletch_tests::user::{User, plain, processes, said, shows};
use fletch_tests::watch::until;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn a_folder_is_mounted_refreshed_and_taken_down() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("one");
    let mut all = user.dataset("photos", 30);
    let before = files(&user.path("photos"));
    let first = user.say(&["mount", "photos", "mnt"]).ok().in_plain_words();
    assert!(first.stderr.contains("started your server"), "{first:?}");
    assert!(!first.stderr.contains("reads "), "nothing is read first: {first:?}");
    for part in ["photos is at ", "30 files", "cache ", "state ", "logs ", "draft:", "fusermount3 -u "] {
        assert!(first.stdout.contains(part), "{part:?} is not in: {}", first.stdout);
    }
    shows(&user.path("mnt"), &all);
    assert_eq!(files(&user.path("photos")), before, "nothing is written into the dataset");

    // All was read, so there is a version.
    until("the draft is sealed", Duration::from_secs(20), || {
        user.say(&["show", "photos", "--json"]).ok().stdout.contains("\"layout_kind\": \"index\"")
    });
    // The second run shows at once what was read, under the same name, and says how old it is.
    let again = user.say(&["mount", "photos", "mnt2"]).ok().in_plain_words();
    assert!(again.stdout.contains("as it was ") && !again.stderr.contains("reads "), "{again:?}");
    assert!(again.took < Duration::from_secs(5), "{again:?}");
    let by_name = user.mount("photos", "mnt3", &[]);
    assert_eq!(
        (by_name["name"].as_str(), by_name["started_server"].as_bool()),
        (Some("photos"), Some(false))
    );
    // The same command again makes sure of everything. Another dataset does not go there.
    for (dir, is_draft) in [("mnt", true), ("mnt2", false)] {
        let same = user.say(&["mount", "photos", dir]).ok().in_plain_words();
        assert!(same.stdout.contains(&format!("{dir} already: 30 files")), "{same:?}");
        assert_eq!(same.stderr.contains("shows a draft of photos"), is_draft, "{same:?}");
        assert_eq!(user.mount("photos", dir, &[])["already"].as_bool(), Some(true));
    }
    user.dataset("other", 3);
    user.say(&["mount", "other", "mnt"]).fails(&["shows photos already", "fusermount3 -u"]);
    assert!(!user.say(&["datasets"]).ok().stdout.contains("other"), "nothing was read for it");

    // A mount shows one version; a refresh and another mount show the next.
    all.insert("new".into(), b"new".to_vec());
    fs::write(user.path("photos/new"), "new").expect("write");
    let refreshed = user.say(&["refresh", "photos"]).ok().in_plain_words();
    assert!(refreshed.stdout.contains("31 files"), "{refreshed:?}");
    assert!(!user.path("mnt/new").exists());
    user.say(&["mount", "photos", "mnt2"]).fails(&["shows an older version of photos", "fusermount3 -u"]);
    fs::write(user.path("photos/newer"), "newer").expect("write");
    all.insert("newer".into(), b"newer".to_vec());
    let count = user.mount(&user.text("photos"), "mnt4", &["--refresh"]);
    assert_eq!(count["files"].as_u64(), Some(32));
    shows(&user.path("mnt4"), &all);

    until("all mounts announced themselves", Duration::from_secs(25), || {
        let status = user.say(&["status", "--json"]).ok().stdout;
        let status: Value = serde_json::from_str(&status).expect("JSON");
        status["mounts"].as_array().is_some_and(|all| all.len() == 4)
    });

    let down = user.say(&["down"]).ok().in_plain_words();
    assert!(down.stdout.contains("unmounted ") && down.stdout.contains("stopped your server"), "{down:?}");
    for dir in ["mnt", "mnt2", "mnt3", "mnt4"] {
        assert!(!is_mounted(&user.path(dir)), "{dir}");
    }
    until("no process is left", Duration::from_secs(10), || processes(user.dir.path()).is_empty());
    assert!(!user.path("run/fletch").exists(), "the directory of the socket stays");
    user.say(&["down"]).ok();

    // What was read is kept: the next mount starts a server and reads nothing again.
    let later = user.say(&["mount", "photos", "mnt"]).ok();
    assert!(!later.stderr.contains("reads "), "{later:?}");
    shows(&user.path("mnt"), &all);
}

#[test]
fn a_pack_is_made_and_served() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("one");
    let all = user.dataset("photos", 40);
    let first = user.say(&["mount", "photos", "mnt", "--pack"]).ok().in_plain_words();
    assert!(first.stderr.contains("copies in large pieces"), "{first:?}");
    shows(&user.path("mnt"), &all);
    let shown: Value =
        serde_json::from_str(&user.say(&["show", "photos", "--json"]).ok().stdout).expect("JSON");
    assert_eq!(shown["layout_kind"], "pack", "{shown}");
    fs::write(user.path("photos/new"), "new").expect("write");
    let refreshed = user.say(&["refresh", "photos"]).ok();
    assert!(refreshed.stdout.contains("41 files"), "{refreshed:?}");
    let shown: Value =
        serde_json::from_str(&user.say(&["show", "photos", "--json"]).ok().stdout).expect("JSON");
    assert_eq!(shown["layout_kind"], "pack", "a refresh keeps the pack: {shown}");
    let mut c = user.command(&["mount", "s3://bucket/x", "mnt2", "--pack"]);
    c.env("AWS_REGION", "eu-central-1");
    said(c).fails(&["--pack needs a place", "--pack s3://"]);
}

/// Kills each process of a program whose command line has these words. Returns how many.
fn killed(program: &str, words: &str) -> usize {
    let mut n = 0;
    for entry in fs::read_dir("/proc").expect("proc").flatten() {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.split(' ').next().is_some_and(|first| format!("{first} ").ends_with(program))
            && line.contains(words)
        {
            let pid = entry.file_name().to_string_lossy().parse().expect("a pid");
            kill(Pid::from_raw(pid), Signal::SIGKILL).expect("killed");
            n += 1;
        }
    }
    n
}

#[test]
fn a_mount_outlives_its_server() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let Some(s3) = servers::s3("bucket") else { return };
    let mut user = User::new("one");
    let all = fill(&bucket(&s3.endpoint(), user.dir.path()), 12);
    user.has_keys_of(s3.endpoint());
    user.mount("s3://bucket/set", "mnt", &[]);
    let server = || killed("fletch-server ", &user.text("state"));
    let doctor = || {
        let out = user.command(&["doctor", "--listen", "none"]).output().expect("fletch doctor");
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    assert!(!doctor().contains("own-server"), "{}", doctor());

    // Nothing was read yet: each read needs the server, and its credentials for the bucket.
    assert_eq!(server(), 1);
    let dead = doctor();
    assert!(dead.contains("error: own-server: ") && dead.contains("1 mount"), "{dead}");
    assert!(dead.contains(&user.text("mnt")) && dead.contains("fletch up"), "{dead}");
    let begun = Instant::now();
    shows(&user.path("mnt"), &all);
    assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
    let log = fs::read_to_string(user.path("state/machines/one/mount.log")).expect("the log");
    assert!(log.contains("the server runs again"), "{log}");
    assert!(!doctor().contains("error: own-server"), "{}", doctor());

    // By hand, with the command that the doctor names, and with the command that made the mount.
    for words in [&["up"][..], &["mount", "s3://bucket/set", "mnt"]] {
        assert_eq!(server(), 1);
        user.say(words).ok().in_plain_words();
        user.say(&["status"]).ok();
        assert!(!doctor().contains("error: own-server"), "{}", doctor());
        assert!(!doctor().contains("error: credentials"), "{}", doctor());
    }
    // A server that was started without them has none.
    assert_eq!(server(), 1);
    let keys = user.more.clone();
    user.more.retain(|name, _| !name.starts_with("AWS_"));
    user.say(&["up"]).ok();
    let doctor = user.say(&["doctor", "--listen", "none"]);
    assert!(doctor.stdout.contains("no credentials for s3://bucket"), "{doctor:?}");
    user.more = keys;
    user.say(&["up"]).ok();
    let healed = user.say(&["doctor", "--listen", "none"]);
    assert!(!healed.stdout.contains("error: credentials"), "{healed:?}");
    user.say(&["down"]).ok();
    assert!(!is_mounted(&user.path("mnt")));
}

#[test]
fn a_place_that_cannot_be_mounted_is_refused_before_anything_is_read() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("one");
    user.dataset("photos", 3);
    fs::write(user.path("file"), "").expect("write");
    fs::create_dir_all(user.path("full/below")).expect("mkdir");
    user.say(&["mount", "photos", "file"]).mistake(2, &["is a file"]);
    user.say(&["mount", "photos", "file/below"]).mistake(2, &["is no directory"]);
    user.say(&["mount", "photos", "full"]).mistake(2, &["has files", "--allow-non-empty"]);
    assert!(!user.socket().exists(), "no server was started for a place that cannot be mounted");
    user.mount("photos", "full", &["--allow-non-empty"]);
    assert!(!user.path("full/below").exists());
    user.say(&["down"]).ok();
    assert!(user.path("full/below").is_dir());
}

#[test]
fn down_ends_the_mounts_of_a_named_server() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let owner = User::new("one");
    owner.dataset("photos", 3);
    owner.mount("photos", "mnt", &[]);
    let mut user = User::new("two");
    user.more.insert("FLETCH_SERVER", format!("unix:{}", owner.socket().display()));
    user.mount("photos", "mnt", &[]);
    let down = user.say(&["down"]).ok();
    assert!(down.stdout.contains("unmounted ") && !is_mounted(&user.path("mnt")), "{down:?}");
    assert!(is_mounted(&owner.path("mnt")), "another account's mount stays");
    owner.say(&["down"]).ok();
}

#[test]
fn a_killed_mount_is_named_repaired_and_taken_down() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("one");
    let all = user.dataset("photos-k", 5);
    user.mount("photos-k", "mnt", &[]);
    let kill_mount = || {
        assert!(killed("fletch-mount ", &format!("{} ", user.text("mnt"))) > 0);
        until("the mount is dead", Duration::from_secs(5), || {
            nix::sys::statvfs::statvfs(&user.path("mnt")) == Err(nix::errno::Errno::ENOTCONN)
        });
    };
    kill_mount();
    let status = user.say(&["status"]).ok();
    assert!(status.stdout.contains("dead") && status.stdout.contains(&user.text("mnt")), "{status:?}");
    user.mount("photos-k", "mnt", &[]);
    shows(&user.path("mnt"), &all);
    kill_mount();
    user.say(&["down"]).ok();
    assert!(!is_mounted(&user.path("mnt")));
}

/// Opens the dataset in the bucket, without Fletch's server.
fn bucket(endpoint: &str, dir: &Path) -> Origin {
    let credentials = dir.join("credentials-of-the-test");
    fs::write(&credentials, "[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
        .expect("write");
    let config = OriginConfig {
        prefix: "s3://bucket".to_owned(),
        endpoint: Some(endpoint.to_owned()),
        region: Some("us-east-1".to_owned()),
        credentials: Some(Credentials::File(credentials)),
        allow_http: true,
        ..OriginConfig::default()
    };
    let origins = Origins::new(vec![config], OriginLimits::default()).expect("origins");
    origins.open(&OriginUri::parse("s3://bucket/set").expect("uri")).expect("open")
}

/// Puts objects into the bucket. Returns what a mount must show.
fn fill(origin: &Origin, objects: usize) -> BTreeMap<PathBuf, Vec<u8>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let all: BTreeMap<PathBuf, Vec<u8>> = (0..objects)
        .map(|i| {
            let mut bytes = vec![0; 20_000 + i % 7000];
            blake3::Hasher::new().update(&i.to_le_bytes()).finalize_xof().fill(&mut bytes);
            (PathBuf::from(format!("d{}/f{i:05}", i % 4)), bytes)
        })
        .collect();
    runtime.block_on(async {
        for (rel, bytes) in &all {
            let path = rel.display().to_string();
            origin.put(&path, bytes.clone().into(), PutMode::Overwrite).await.expect("put");
        }
    });
    all
}

/// Reads each object once, 64 at once, and returns the time.
fn bare_read(origin: &Origin, all: &BTreeMap<PathBuf, Vec<u8>>) -> Duration {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let names: Vec<String> = all.keys().map(|rel| rel.display().to_string()).collect();
    let begun = Instant::now();
    runtime.block_on(async {
        let mut under_way = tokio::task::JoinSet::new();
        for name in names {
            if under_way.len() >= 64 {
                under_way.join_next().await.expect("one").expect("joined");
            }
            let origin = origin.clone();
            under_way.spawn(async move {
                assert!(!origin.get(&name, None, None).await.expect("read").bytes.is_empty());
            });
        }
        while under_way.join_next().await.is_some() {}
    });
    begun.elapsed()
}

#[test]
fn a_bucket_is_mounted_with_the_credentials_of_the_terminal() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let Some(s3) = servers::s3("bucket") else { return };
    let wanted = std::env::var("FLETCH_MOUNT_OBJECTS").ok().and_then(|n| n.parse().ok());
    let mut user = User::new("one");
    let origin = bucket(&s3.endpoint(), user.dir.path());
    let all = fill(&origin, wanted.unwrap_or(60));
    user.has_keys_of(s3.endpoint());
    let bare = bare_read(&origin, &all);
    let begun = Instant::now();
    let first = user.say(&["mount", "s3://bucket/set", "mnt"]).ok().in_plain_words();
    let names = files(&user.path("mnt"));
    let first_took = begun.elapsed();
    assert_eq!(names.len(), all.len(), "{first:?}");
    shows(&user.path("mnt"), &all);
    let second = user.say(&["mount", "s3://bucket/set", "mnt2"]).ok().in_plain_words();
    println!(
        "{} objects: one bare read {:.2} s, first run {:.2} s, second run {:.2} s",
        all.len(),
        bare.as_secs_f64(),
        first_took.as_secs_f64(),
        second.took.as_secs_f64()
    );
    let (slack, second_most) = if wanted.is_some() { (3, 1) } else { (30, 10) };
    assert!(first_took <= bare + Duration::from_secs(slack), "{first_took:?}, bare {bare:?}");
    assert!(second.took <= Duration::from_secs(second_most), "{second:?}");

    // The server names whose credentials it has, and no secret is written anywhere.
    let status = user.say(&["status"]).ok();
    assert!(status.stdout.contains("credentials") && status.stdout.contains("s3://bucket"), "{status:?}");
    let logs = ["server.log", "mount.log"]
        .map(|name| fs::read_to_string(user.path("state/machines/one").join(name)).unwrap_or_default());
    for text in [&status.stdout, &first.stdout, &first.stderr, &logs[0], &logs[1]] {
        assert!(!text.contains("hunter2secret"), "{text}");
    }

    // A server that somebody else shares reads with its own credentials, and the command says so.
    let server = format!("unix:{}", user.socket().display());
    let mut other = User::new("two");
    other.more = user.more.clone();
    other.more.insert("FLETCH_SERVER", server);
    let told = other.say(&["mount", "s3://bucket/set", "mnt"]).ok();
    assert!(told.stderr.contains("do not count"), "{told:?}");
    let down = user.say(&["down"]).ok();
    assert!(down.stdout.contains("(set)"), "{down:?}");
    // Another account's mount of that server may be announced later than this.
    if is_mounted(&other.path("mnt")) {
        let done = Command::new("umount").arg("-l").arg(other.path("mnt")).status().expect("umount");
        assert!(done.success());
    }
}

#[test]
fn a_container_is_mounted_with_the_credentials_of_the_terminal() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let Some(azure) = servers::azure("container") else { return };
    let mut user = User::new("one");
    let endpoint = format!("{}/{}", azure.endpoint(), servers::AZURE_ACCOUNT);
    let credentials = user.path("credentials-of-the-test");
    fs::write(&credentials, format!("azure_storage_account_key = {}\n", servers::AZURE_KEY)).expect("write");
    let config = OriginConfig {
        prefix: "az://container".to_owned(),
        endpoint: Some(endpoint.clone()),
        account: Some(servers::AZURE_ACCOUNT.to_owned()),
        credentials: Some(Credentials::File(credentials)),
        allow_http: true,
        ..OriginConfig::default()
    };
    let origins = Origins::new(vec![config], OriginLimits::default()).expect("origins");
    let uri = OriginUri::parse("az://container/set").expect("uri");
    let all = fill(&origins.open(&uri).expect("open"), 8);
    user.say(&["mount", "az://container/set", "mnt"]).fails(&["AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY"]);
    for (name, value) in [
        ("AZURE_STORAGE_ACCOUNT", servers::AZURE_ACCOUNT),
        ("AZURE_STORAGE_KEY", servers::AZURE_KEY),
        ("AZURE_STORAGE_ENDPOINT", &endpoint),
    ] {
        user.more.insert(name, value.to_owned());
    }
    let mounted = user.say(&["mount", "az://container/set", "mnt"]).ok().in_plain_words();
    shows(&user.path("mnt"), &all);
    let status = user.say(&["status"]).ok();
    assert!(status.stdout.contains("az://container"), "{status:?}");
    for text in [&status.stdout, &mounted.stdout, &mounted.stderr] {
        assert!(!text.contains(servers::AZURE_KEY), "{text}");
    }
}

#[test]
fn expired_credentials_are_named_and_replaced_by_the_next_mount() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let Some(s3) = servers::s3("bucket") else { return };
    let mut user = User::new("one");
    let all = fill(&bucket(&s3.endpoint(), user.dir.path()), 5);
    for (name, value) in [
        ("AWS_ACCESS_KEY_ID", "AKIATESTTEST"),
        ("AWS_SECRET_ACCESS_KEY", "hunter2secret"),
        ("AWS_SESSION_TOKEN", "session"),
        ("AWS_CREDENTIAL_EXPIRATION", "2020-01-01T00:00:00Z"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", &s3.endpoint()),
    ] {
        user.more.insert(name, value.to_owned());
    }
    // Whoever waits for a store that refuses waits for the mount's own timeout at most.
    let mounted = user.say(&["mount", "s3://bucket/set", "mnt"]);
    let status = if mounted.code == 0 { user.say(&["status"]).ok().stdout } else { mounted.stderr };
    assert!(status.contains("expired"), "{status}");
    user.more.remove("AWS_CREDENTIAL_EXPIRATION");
    user.more.remove("AWS_SESSION_TOKEN");
    user.mount("s3://bucket/set", "mnt2", &[]);
    shows(&user.path("mnt2"), &all);
    let status = user.say(&["status"]).ok();
    assert!(!status.stdout.contains("expired"), "the newer ones replace the older ones: {status:?}");
}

#[test]
fn two_machines_on_one_home_have_two_servers() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let one = User::new("one");
    one.dataset("photos", 3);
    one.mount("photos", "mnt1", &[]);
    // The other machine sees the same home, and has a runtime directory of its own.
    let run = one.path("run-two");
    fs::create_dir(&run).expect("mkdir");
    let on_two = |words: &[&str]| {
        let mut c = one.command(words);
        c.env("FLETCH_MACHINE_ID", "two").env("XDG_RUNTIME_DIR", &run);
        said(c)
    };
    on_two(&["mount", "photos", "mnt2"]).ok();
    for (machine, other) in [("one", "two"), ("two", "one")] {
        for kind in ["state", "cache"] {
            assert!(one.path(kind).join("machines").join(machine).is_dir(), "{kind} of {machine}");
        }
        assert_ne!(machine, other);
    }
    assert_eq!(fs::metadata(run.join("fletch")).expect("made").permissions().mode() & 0o777, 0o700);
    let two = on_two(&["status", "--json"]).ok();
    let two: Value = serde_json::from_str(&two.stdout).expect("JSON");
    assert!(two["server"].as_str().is_some_and(|at| at.contains("run-two")), "{two}");
    on_two(&["down"]).ok();
    assert!(is_mounted(&one.path("mnt1")), "the other machine's mount stays");
    assert!(!is_mounted(&one.path("mnt2")));
}

#[test]
fn two_commands_at_once_start_one_server() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("one");
    user.dataset("a", 3);
    user.dataset("b", 3);
    let children: Vec<_> = [("a", "mnt-a"), ("b", "mnt-b")]
        .iter()
        .map(|(source, dir)| user.command(&["mount", source, dir, "--json"]).spawn().expect("spawn"))
        .collect();
    for mut child in children {
        assert!(child.wait().expect("wait").success());
    }
    let servers = processes(&user.socket()).iter().filter(|line| line.contains("fletch-server")).count();
    assert_eq!(servers, 1);
}

#[test]
fn a_stale_socket_is_replaced_and_a_file_there_is_named() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("one");
    user.dataset("photos", 3);
    fs::create_dir(user.path("run/fletch")).expect("mkdir");
    drop(UnixListener::bind(user.socket()).expect("a socket without a process"));
    user.mount("photos", "mnt", &[]);
    user.say(&["down"]).ok();
    fs::create_dir(user.path("run/fletch")).expect("mkdir");
    fs::write(user.socket(), "no socket").expect("write");
    user.say(&["mount", "photos", "mnt"]).fails(&["server.sock"]);
    fs::remove_file(user.socket()).expect("removed");
}

/// Answers every request on a socket as a server of another release does.
fn impostor(socket: &Path, version: &str) {
    let listener = UnixListener::bind(socket).expect("bind");
    let info = format!(
        r#"{{"name":"fletch-server","version":"{version}","formats":{{"api":[1],"versions":[1],"frames":[1]}},
            "limits":{{"batch_items":1,"batch_bytes":1,"chunk_bytes":1}}}}"#
    );
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            while stream.read_line(&mut line).is_ok_and(|n| n > 2) {
                line.clear();
            }
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\
                 Content-Length: {}\r\n",
                info.len()
            );
            // A client that gave up sees nothing of it.
            let _gone = write!(stream.get_mut(), "{head}\r\n{info}");
        }
    });
}

#[test]
fn an_older_server_is_named_with_the_next_command() {
    let user = User::new("one");
    user.dataset("photos", 3);
    fs::create_dir(user.path("run/fletch")).expect("mkdir");
    impostor(&user.socket(), "0.0.1");
    user.say(&["mount", "photos", "mnt"]).fails(&["fletch-server 0.0.1", "fletch down"]);
    fs::remove_file(user.socket()).expect("removed");
}

#[test]
fn mistakes_are_named_before_anything_is_started() {
    let user = User::new("one");
    user.say(&["mount", "nowhere/photos", "mnt"]).fails(&["there is no directory nowhere/photos", "s3://"]);
    user.say(&["mount", "https://host/x", "mnt"]).fails(&["no listing", "--list FILE"]);
    user.say(&["mount", "s3://bucket/x", "mnt"]).fails(&["no credentials for s3://bucket/x", "AWS_REGION"]);
    assert!(!user.socket().exists(), "no server was started for that");
    // Without tables of its own, a server elsewhere must name a place before a byte is read.
    user.dataset("photos", 3);
    let mut c = user.command(&["index", "photos"]);
    c.env("FLETCH_SERVER", "http://127.0.0.1:9");
    said(c).fails(&["127.0.0.1:9"]);
    let done = user.say(&["index", "photos"]).ok();
    assert!(!user.path("photos/fletch").exists(), "nothing is written into the dataset: {done:?}");
    user.say(&["ls", "photos"]).ok();
}

#[test]
fn the_help_of_the_first_commands_is_in_plain_words() {
    for verb in ["mount", "refresh", "down"] {
        let mut c = Command::new(bin_dir().join("fletch"));
        let help = said({
            c.args([verb, "--help"]);
            c
        })
        .ok();
        let text = help.stdout.split("Global options").next().unwrap_or_default().to_owned();
        plain(&text);
        let lines = help.stdout.lines().count();
        assert!(lines <= 40, "{verb}: {lines} lines");
    }
}

/// The user unit starts a server where `fletch mount` looks for it. systemd's specifiers are replaced here.
#[test]
fn the_server_of_the_user_unit_is_the_one_that_mount_uses() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("lingering");
    let unit = fs::read_to_string(repo().join("packaging/systemd/user/fletch-server.service")).expect("unit");
    let start = unit.replace("\\\n", " ");
    let start = start.lines().find_map(|l| l.strip_prefix("ExecStart=fletch-server ")).expect("ExecStart");
    let start = start
        .replace("%h/.local/state/fletch", &user.text("state"))
        .replace("%h/.cache/fletch", &user.text("cache"))
        .replace("%t", &user.text("run"))
        .replace("%m", &user.machine)
        .replace("%%", "%");
    assert!(unit.contains("RuntimeDirectory=fletch\nRuntimeDirectoryMode=0700"), "{unit}");
    fs::create_dir(user.path("run/fletch")).expect("mkdir");
    fs::set_permissions(user.path("run/fletch"), fs::Permissions::from_mode(0o700)).expect("chmod");
    let log = fs::File::create(user.path("log")).expect("log");
    let mut server = command("fletch-server");
    let mut server = server.args(start.split_whitespace()).stderr(log).spawn().expect("start");
    until("the server answers", Duration::from_secs(20), || user.socket().exists());

    user.dataset("photos", 3);
    let mounted = user.mount("photos", "mnt", &[]);
    assert_eq!(mounted["started_server"], Value::Bool(false), "{mounted}");
    assert!(mounted["server"].as_str().expect("text").ends_with("run/fletch/server.sock"), "{mounted}");
    assert_eq!(mounted["state"], user.text("state/machines/lingering"));
    assert_eq!(mounted["cache"], user.text("cache/machines/lingering"));
    user.say(&["down"]).ok();
    assert!(server.wait().expect("ended").success());
}
