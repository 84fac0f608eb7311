use super::*;

#[test]
fn texts_have_one_normal_form_that_reads_back() {
    for (text, normal) in [
        ("/data/sets/", "file:///data/sets"),
        ("/data//a/./b", "file:///data/a/b"),
        ("/", "file:///"),
        ("file:///data/a%20b", "file:///data/a%20b"),
        ("file://localhost/data", "file:///data"),
        ("/data/x#1/é/a%20b ?", "file:///data/x%231/%C3%A9/a%2520b%20%3F"),
        ("s3://bucket", "s3://bucket"),
        ("S3://bucket/", "s3://bucket"),
        ("s3://bucket/a b/x#1/a%20b/", "s3://bucket/a b/x#1/a%20b"),
        ("az://cont-1/a b/", "az://cont-1/a b"),
        ("gs://bucket.x_y/a?b", "gs://bucket.x_y/a?b"),
        ("s3://bucket~127.0.0.1:9000/a/", "s3://bucket~127.0.0.1:9000/a"),
        ("az://cont-1~127.0.0.1:10000+me", "az://cont-1~127.0.0.1:10000+me"),
        ("https://Host:443/a%20b/%C3%A9/", "https://host/a%20b/%C3%A9"),
        ("http://host:8080", "http://host:8080"),
        ("http://[::1]:80/x%231", "http://[::1]/x%231"),
    ] {
        let uri = OriginUri::parse(text).expect(text);
        assert_eq!(uri.to_string(), normal);
        assert_eq!(OriginUri::parse(normal), Ok(uri));
    }
    let here = std::env::current_dir().expect("working directory");
    assert_eq!(OriginUri::parse("sub").expect("relative").as_local(), Some(here.join("sub").as_path()));
}

#[test]
fn invalid_uris_are_rejected_with_a_reason() {
    for (text, why) in [
        ("", "empty"),
        ("/data/../etc", ".."),
        ("../data", ".."),
        ("file:///data/../etc", ".."),
        ("file:///data/%2E%2e/etc", ".."),
        ("file://host/data", "host"),
        ("file:///data?x=1", "%3F"),
        ("s3://", "bucket"),
        ("s3://bucket/a/../b", ".."),
        ("s3://bucket//b", "relative"),
        ("ftp://host/x", "az://container/prefix"),
        ("az://Container/x", "lower-case"),
        ("az://a/x", "3-63"),
        ("gs://x", "bucket"),
        ("s3://bucket~/a", "the name of a store"),
        ("s3://bucket~a b/a", "the name of a store"),
        ("s3://~store/a", "bucket"),
        ("https:///x", "host"),
        ("https://host/x?y=1", "query"),
        ("https://host/x#y", "fragment"),
        ("https://host/a/../x", ".."),
        ("https://host/a/%2e%2E/x", ".."),
        ("https://host/a%2Fb", "slash"),
        ("https://host/a%ff", "UTF-8"),
        ("https://host/a//b", "empty"),
        ("https://host/a\rb`", "line break"),
        ("https://host/pub/.%0D./secret", "line break"),
        ("https://host/pub/.\t./secret", "line break"),
        ("/da\0ta", "NUL"),
    ] {
        let error = OriginUri::parse(text).expect_err(text);
        assert!(matches!(&error, OriginError::Invalid { .. }), "{text}: {error:?}");
        assert!(error.to_string().contains(why), "{text}: {error}");
    }
}

#[test]
fn secrets_are_rejected_and_not_repeated() {
    for text in [
        "s3://key:hunter2@bucket/x",
        "https://u:hunter2@h/x",
        "https://h/x?X-Amz-Signature=hunter2",
        "https://h/x?sv=hunter2",
        "az://container/x?sv=1&sig=hunter2",
        "gs://bucket/x?X-Goog-Signature=hunter2",
        "https://h/x#hunter2",
    ] {
        let error = OriginUri::parse(text).expect_err(text);
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
}

#[test]
fn join_and_contains_go_by_components() {
    let base = OriginUri::parse("s3://bucket/a").expect("uri");
    assert_eq!(base.join("b/c").expect("join").to_string(), "s3://bucket/a/b/c");
    for bad in ["", "/x", "../x", "a//b", "a/.", "a\0"] {
        assert!(base.join(bad).is_err(), "{bad:?}");
    }
    let contains = |a: &str, b: &str| OriginUri::parse(a).expect(a).contains(&OriginUri::parse(b).expect(b));
    assert!(contains("s3://bucket", "s3://bucket/a"));
    assert!(contains("s3://bucket/a", "s3://bucket/a/b"));
    assert!(!contains("s3://bucket/a", "s3://bucket/ab"));
    assert!(!contains("s3://bucket/a", "s3://bucket"));
    assert!(contains("/data", "file:///data/x") && contains("/data", "/data"));
    assert!(!contains("/data", "/database"));
    assert!(!contains("/", "s3://bucket"));
    assert!(contains("https://h/a", "https://h/a/b") && contains("https://h", "https://h/a"));
    assert!(!contains("https://h/a", "http://h/a/b") && !contains("https://h", "https://h:1/a"));
    assert!(!contains("s3://bucket", "gs://bucket/a") && !contains("az://bucket", "s3://bucket"));
    let plain = OriginUri::parse("https://h/a").expect("uri");
    assert_eq!(plain.join("b c/%20").expect("join").to_string(), "https://h/a/b%20c/%2520");
}

#[test]
fn dots_in_an_argument_are_resolved() {
    let dir = tempfile::tempdir().expect("tempdir");
    std::fs::create_dir(dir.path().join("a")).expect("mkdir");
    let text = format!("{}/a/..", dir.path().display());
    let real = std::fs::canonicalize(dir.path()).expect("canonicalize");
    assert_eq!(OriginUri::from_arg(&text).expect("resolved").as_local(), Some(real.as_path()));
    assert!(OriginUri::from_arg("s3://bucket/../x").is_err());
}
