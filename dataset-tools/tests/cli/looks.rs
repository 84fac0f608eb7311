//! `ls`, `show`, `diff`, the shapes of `--json`, help, and errors of the server commands.

use crate::common::{Fixture, bytes, keys};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;

#[test]
fn shapes_of_json() {
    let w = Fixture::new();
    w.write("d/a", "a");
    w.write("big", bytes(1, 5_000_000));
    let report = w.json(&["index", "data"]);
    assert_eq!(
        keys(&report),
        [
            "bytes",
            "bytes_read",
            "bytes_reused",
            "entries",
            "file_bytes",
            "files",
            "files_read",
            "files_reused",
            "layout",
            "root",
            "samples",
            "seconds",
            "skipped",
            "tables",
            "tag",
            "uri"
        ]
    );
    let show = w.json(&["show", "data"]);
    assert_eq!(
        keys(&show),
        [
            "base",
            "bytes",
            "chunks",
            "created",
            "entries",
            "file_bytes",
            "files",
            "group_bytes",
            "indexed_at_ns",
            "layout",
            "layout_kind",
            "origin",
            "parts",
            "root",
            "sample_rule",
            "samples",
            "skipped",
            "slice_bytes",
            "tool"
        ]
    );
    let pack = w.json(&["pack", "data", "--to", "packs"]);
    assert_eq!(
        keys(&pack),
        [
            "bytes",
            "bytes_read",
            "bytes_reused",
            "chunk_bytes_written",
            "chunks_found",
            "chunks_written",
            "entries",
            "file_bytes",
            "files",
            "files_read",
            "files_reused",
            "index_layout",
            "kept",
            "layout",
            "root",
            "samples",
            "seconds",
            "skipped",
            "tables",
            "tag",
            "uri"
        ]
    );
    let again = w.json(&["pack", "data", "--to", "packs", "--parent", "auto"]);
    assert_eq!(keys(&again["kept"]), ["bytes", "chunks", "samples", "samples_outside"]);
    let packed = w.json(&["show", "packs"]);
    assert_eq!(
        (packed["layout_kind"].as_str(), packed["group_bytes"].as_u64()),
        (Some("pack"), Some(6 << 20))
    );
    let entry = w.json(&["show", "data", "d/a"]);
    assert_eq!(
        keys(&entry),
        ["blake3", "kind", "ordinal", "path", "root", "sample", "size", "slices", "target"]
    );
    assert_eq!(keys(&entry["slices"][0]), ["chunk", "chunk_offset", "length"]);
    let ls = w.json(&["ls", "data"]);
    assert_eq!(keys(&ls), ["children", "count", "path", "root"]);
    assert_eq!(keys(&ls["children"][0]), ["kind", "name", "size"]);
    let failed = w.run(&["ls", "data", "none", "--json"]).code(1).json();
    assert_eq!(keys(&failed), ["error"]);
    assert_eq!(keys(&failed["error"]), ["code", "hint", "message"]);
}

#[test]
fn ls_lists_a_directory() {
    let w = Fixture::new();
    for f in ["d/a", "d/b/c", "d-e", "x"] {
        w.write(f, f);
    }
    fs::create_dir(w.data().join("empty")).expect("mkdir");
    w.index(&[]);
    assert_eq!(w.run(&["ls", "data"]).ok().stdout, "d-e\nd/\nempty/\nx\n");
    assert_eq!(w.run(&["ls", "data", "d"]).ok().stdout, "a\nb/\n");
    assert_eq!(w.run(&["ls", "data", "./d/"]).ok().stdout, "a\nb/\n");
    assert_eq!(w.run(&["ls", "data", "empty"]).ok().stdout, "");
    assert_eq!(w.run(&["ls", "data", "x"]).ok().stdout, "x\n");
    let long = w.run(&["ls", "data", "-l"]).ok().stdout;
    assert_eq!(
        long.lines().last().map(|l| l.split_whitespace().collect::<Vec<_>>()),
        Some(vec!["file", "1", "x"])
    );
    w.run(&["ls", "data", "none"]).code(1).says("not in version");
}

#[test]
fn diff_shows_what_changed() {
    let w = Fixture::new();
    for (f, text) in [("same", "s"), ("gone", "g"), ("grown", "1"), ("other", "1"), ("kind", "k")] {
        w.write(f, text);
    }
    // Enough entries for several parts.
    for i in 0..9000 {
        w.write(&format!("many/{i:05}"), "");
    }
    w.index(&["--tag", "one"]);
    fs::remove_file(w.data().join("gone")).expect("rm");
    fs::remove_file(w.data().join("kind")).expect("rm");
    std::os::unix::fs::symlink("same", w.data().join("kind")).expect("link");
    w.write("grown", "12");
    w.write("other", "2");
    w.write("many/05000x", "");
    w.index(&["--tag", "two"]);
    let ran = w.run(&["diff", "data@one", "data@two"]).ok().says("1 added, 1 removed, 3 changed");
    let want = "- gone\n~ grown (size, content)\n~ kind (kind, size, content, target, sample)\n\
                + many/05000x\n~ other (content)\n";
    assert_eq!(ran.stdout, want);
    let back = w.json(&["diff", "data@two", "data@one"]);
    assert_eq!(keys(&back), ["a", "b", "changes", "summary"]);
    assert_eq!(back["summary"], serde_json::json!({"added": 1, "removed": 1, "changed": 3}));
    assert_eq!(keys(&back["changes"][0]), ["a", "b", "change", "path", "what"]);
    assert_eq!(back["changes"][0]["change"], "added");
    let none = w.json(&["diff", "data@one", "data@one"]);
    assert_eq!(none["changes"], serde_json::json!([]));
}

#[test]
fn every_command_has_an_example() {
    let w = Fixture::new();
    let help = w.run(&["--help"]).ok().stdout;
    let codes =
        "Exit codes: 0 ok, 1 failed, 2 misused, 3 in part, 4 unreachable, 5 denied, 6 disk full, 130 Ctrl-C";
    assert!(help.contains(codes), "{help}");
    let commands = help.lines().skip_while(|l| *l != "Commands:").skip(1).take_while(|l| !l.is_empty());
    let names: Vec<&str> = commands
        .filter_map(|l| l.strip_prefix("  "))
        // A long description goes on in lines further in.
        .filter(|l| !l.starts_with(' '))
        .filter_map(|l| l.split_whitespace().next())
        .collect();
    assert!(names.len() >= 11, "{help}");
    for name in names.into_iter().filter(|n| *n != "help" && n.chars().all(|c| c.is_ascii_lowercase())) {
        let help = w.run(&[name, "--help"]).ok().stdout;
        assert!(help.contains("Example") && help.contains(&format!("  fletch {name}")), "{name}: {help}");
    }
    assert!(w.run(&["completions", "bash"]).ok().stdout.contains("fletch"));
    w.run(&["no-such-command"]).code(2);
}

#[test]
fn servers_that_are_away_or_refuse() {
    let w = Fixture::new();
    for args in [&["status"][..], &["register", "n", "data"], &["ls", "n"]] {
        let mut away = args.to_vec();
        away.extend(["--server", "http://127.0.0.1:1"]);
        w.run(&away).code(4).says("127.0.0.1:1");
    }
    w.run(&["datasets"]).code(2).says("--server");
    w.run(&["datasets", "--server", "nonsense"]).code(2);
    w.run(&["register", "bad/name", "data", "--server", "http://127.0.0.1:1"]).code(2);

    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address");
    let server = std::thread::spawn(move || {
        let info = r#"{"name":"fletch-server","version":"0",
            "formats":{"api":[1],"versions":[1],"frames":[1]},
            "limits":{"batch_items":1,"batch_bytes":1,"chunk_bytes":1}}"#;
        let refused = r#"{"type":"urn:fletch:problem:uri_not_allowed","title":"t","status":403,
            "detail":"not yours","code":"uri_not_allowed","hint":"ask the operator","retryable":false}"#;
        let mut last = String::new();
        for (status, body) in [("200 OK", info), ("403 Forbidden", refused)] {
            let (mut socket, _) = listener.accept().expect("accept");
            last.clear();
            let mut piece = [0; 4096];
            while !last.ends_with("\r\n\r\n") && !last.ends_with('}') {
                let n = socket.read(&mut piece).expect("read");
                last.push_str(&String::from_utf8_lossy(&piece[..n]));
            }
            let head = "content-type: application/problem+json\r\nconnection: close\r\ncontent-length";
            write!(socket, "HTTP/1.1 {status}\r\n{head}: {}\r\n\r\n{body}", body.len()).expect("write");
        }
        last
    });
    let ran = w.run(&["register", "n", "data", "--server", &format!("http://{address}"), "--json"]).code(5);
    assert_eq!(ran.json()["error"]["hint"], "ask the operator");
    let request = server.join().expect("server");
    // A relative path is made absolute here: the server stands elsewhere.
    let uri = format!("file://{}", w.data().display());
    assert!(request.starts_with("POST /v1/datasets") && request.contains(&uri), "{request}");
}

/// A directory with an `@` in its name, in every command that takes a dataset or a version.
#[test]
fn an_existing_path_wins_in_every_command_and_a_note_says_so() {
    let w = Fixture::new();
    w.write("a", "a");
    fs::rename(w.data(), w.path("me@host")).expect("renamed");
    fs::create_dir(w.path("me")).expect("mkdir");
    let note = "me@host is the path of that name here, and not version host of me";
    let runs: [&[&str]; 9] = [
        &["index", "me@host"],
        &["pack", "me@host"],
        &["ls", "me@host"],
        &["show", "me@host"],
        &["verify", "me@host"],
        &["diff", "me@host", "me@host/"],
        &["tag", "me@host"],
        &["tag", "me@host", "other", "latest"],
        &["index", "me@host", "--parent", "auto"],
    ];
    for words in runs {
        let ran = w.run(words);
        assert_eq!(ran.code, 0, "{words:?}: {}", ran.stderr);
        assert_eq!(ran.stderr.matches(note).count(), 1, "{words:?}: {}", ran.stderr);
    }
    // A slash at the end, or a version of it, can be read in one way only.
    for words in [&["ls", "me@host/"], &["ls", "me@host@latest"], &["ls", "./me@host@other"]] {
        let ran = w.run(words);
        assert_eq!((ran.code, ran.stdout.as_str()), (0, "a\n"), "{words:?}: {}", ran.stderr);
        assert!(!ran.stderr.contains("is the path"), "{words:?}: {}", ran.stderr);
    }
    // These need a server, which is not there. They read the text before they ask.
    let server = ["--server", "http://127.0.0.1:1"];
    let at = w.path("at");
    let at = at.to_str().expect("text");
    let asked: [&[&str]; 4] = [
        &["register", "n", "me@host"],
        &["refresh", "me@host"],
        &["warmup", "me@host"],
        &["mount", "me@host", at],
    ];
    for words in asked {
        let ran = w.run(&[words, server.as_slice()].concat());
        assert!(ran.code != 0 && ran.stderr.contains(note), "{words:?}: {}", ran.stderr);
    }
    // Without such a path the text is a version, which these commands do not take.
    for words in [
        &["index", "me@v1"][..],
        &["pack", "me@v1"],
        &["tag", "me@v1"],
        &["refresh", "me@v1"],
        &["register", "n", "me@v1"],
    ] {
        let ran = w.command_as_written(words).output().map(crate::common::Ran::from).expect("run");
        assert_eq!(ran.code, 2, "{words:?}: {}", ran.stderr);
        assert!(ran.stderr.contains("there is no path me@v1"), "{words:?}: {}", ran.stderr);
    }
    let ran = w.run(&["ls", "me@v1"]);
    assert!(ran.code == 1 && !ran.stderr.contains("is the path"), "{}", ran.stderr);
}
