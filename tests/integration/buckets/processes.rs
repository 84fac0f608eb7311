//! A bucket whose keys come from a program (`credential_process`), as companies with single sign-on have it.

use crate::bucket::Bucket;
use fletch_testkit::Manners;
use fletch_tests::require::{Need, have};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;

const OBJECTS: u64 = 40;

/// Makes the program give this key from now on.
fn give(bucket: &Bucket, key_id: &str) {
    let keys = format!(
        r#"{{"Version": 1, "AccessKeyId": "{key_id}", "SecretAccessKey": "hunter2", "SessionToken": "token",
            "Expiration": "2099-01-01T00:00:00Z"}}"#
    );
    fs::write(bucket.user.path("keys.json"), keys).expect("keys");
    bucket.origin.require_key(Some(key_id));
}

#[test]
fn a_mount_reads_with_the_keys_of_a_program() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let objects: Vec<(String, Vec<u8>)> =
        (0..OBJECTS).map(|i| (format!("d{}/f{i:02}", i % 4), format!("content {i}").into_bytes())).collect();
    let mut bucket = Bucket::new(&Manners::default(), &objects);
    let program = bucket.user.path("give-keys");
    fs::write(&program, format!("#!/bin/sh\ncat '{}'\n", bucket.user.text("keys.json"))).expect("program");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("mode");
    let config = bucket.user.path("aws-config");
    let profile = format!(
        "[profile work]\nregion = us-east-1\nendpoint_url = {}\ncredential_process = {}\n",
        bucket.origin.endpoint(),
        program.display()
    );
    fs::write(&config, profile).expect("config");
    bucket.user.more.retain(|name, _| !name.starts_with("AWS_"));
    let variables = [("AWS_CONFIG_FILE", config.display().to_string()), ("AWS_PROFILE", "work".to_owned())];
    bucket.user.more.extend(variables);

    give(&bucket, "FIRSTKEY");
    bucket.user.mount(&bucket.uri(), "mnt", &[]);
    let paths: Vec<String> = objects.iter().map(|(path, _)| path.clone()).collect();
    assert!(bucket.mounted("mnt") == bucket.held(&paths), "{:?}", bucket.mounted("mnt").keys());

    // The program gives another key, and the store refuses the old one. The same command goes on.
    give(&bucket, "SECONDKEY");
    bucket.origin.insert("set/new", "later");
    bucket.user.say(&["refresh", &bucket.uri()]).ok();
    bucket.user.mount(&bucket.uri(), "mnt2", &[]);
    let paths = [paths, vec!["new".to_owned()]].concat();
    assert!(bucket.mounted("mnt2") == bucket.held(&paths), "{:?}", bucket.mounted("mnt2").keys());
}
