//! Folders as the consoles of three clouds make them: the mount shows what the console shows.

use crate::bucket::{Bucket, listed};
use fletch_testkit::{Api, Manners, servers};
use fletch_tests::require::{Need, have};
use fletch_tests::user::User;
use std::collections::BTreeMap;

/// The objects beside the folders `train` and `void`.
const OBJECTS: [(&str, &str); 3] = [("train.csv", "rows"), ("train/1.jpg", "image"), ("train/2/x", "deep")];

fn shown() -> BTreeMap<String, Vec<u8>> {
    let files = OBJECTS.iter().map(|(key, text)| ((*key).to_owned(), text.as_bytes().to_vec()));
    files.chain([("void/".to_owned(), Vec::new())]).collect()
}

#[track_caller]
fn mounts(user: &User, uri: &str, shown: &BTreeMap<String, Vec<u8>>) {
    let mounted = user.mount(uri, "mnt", &[]);
    assert_eq!(listed(&user.path("mnt")), *shown, "{mounted}");
    user.say(&["refresh", uri]).ok();
}

#[test]
fn a_bucket_of_s3_with_folders_of_its_console() {
    let Some(s3) = servers::s3("bucket") else { return };
    if !have(&[Need::Fuse]) {
        return;
    }
    for (key, text) in OBJECTS {
        s3.put(&format!("/bucket/set/{key}"), text.as_bytes());
    }
    // The console puts an empty object whose key ends in a slash.
    for folder in ["set/", "set/train/", "set/train/2/", "set/void/"] {
        s3.put(&format!("/bucket/{folder}"), b"");
    }
    let mut user = User::new("one");
    user.has_keys_of(s3.endpoint());
    mounts(&user, "s3://bucket/set", &shown());
}

#[test]
fn a_container_of_azure_with_folders_of_its_programs() {
    let Some(azure) = servers::azure("container") else { return };
    if !have(&[Need::Fuse]) {
        return;
    }
    for (blob, text) in OBJECTS {
        servers::azure_blob(&azure, "container", &format!("set/{blob}"), &[], text.as_bytes());
    }
    // Blobfuse, Hadoop and the hierarchical namespace make a stub with metadata. The portal makes a folder
    // when a blob is uploaded into it; other programs write the folder's name with a slash.
    let stub = [("hdi_isfolder", "true")];
    servers::azure_blob(&azure, "container", "set/train", &stub, b"");
    servers::azure_blob(&azure, "container", "set/train/2", &stub, b"");
    servers::azure_blob(&azure, "container", "set/void/", &[], b"");
    let mut user = User::new("one");
    for (name, value) in [
        ("AZURE_STORAGE_ACCOUNT", servers::AZURE_ACCOUNT.to_owned()),
        ("AZURE_STORAGE_KEY", servers::AZURE_KEY.to_owned()),
        ("AZURE_STORAGE_ENDPOINT", format!("{}/{}", azure.endpoint(), servers::AZURE_ACCOUNT)),
    ] {
        user.more.insert(name, value);
    }
    mounts(&user, "az://container/set", &shown());
}

#[test]
fn a_bucket_of_gcs_with_folders_of_its_console() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let bucket = Bucket::new(&Manners { api: Api::Gcs, ..Manners::default() }, &[]);
    for (key, text) in OBJECTS {
        bucket.origin.insert(&format!("set/{key}"), text);
    }
    for folder in ["set", "set/train", "set/train/2", "set/void"] {
        bucket.origin.console_folder(folder);
    }
    mounts(&bucket.user, "gs://bucket/set", &shown());
}
