//! A bucket of the emulator, and the user who reads it with the variables of the environment alone.

use fletch_testkit::{Api, Backing, EmulatorConfig, Manners, OriginEmulator};
use fletch_tests::user::{Said, User};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A service account whose requests are not signed. GCS's client library takes it for emulators.
const GCS_ACCOUNT: &str = r#"{"private_key": "none", "private_key_id": "none",
    "client_email": "test@project.example", "disable_oauth": true}"#;

/// A bucket, and a user without settings. The dataset is `set/`.
pub struct Bucket {
    pub user: User,
    pub origin: OriginEmulator,
}

impl Bucket {
    /// Starts a bucket with these objects below `set/`.
    pub fn new(manners: &Manners, objects: &[(String, Vec<u8>)]) -> Self {
        let config = EmulatorConfig { manners: manners.clone(), ..EmulatorConfig::default() };
        Bucket::over(config, Backing::empty()).filled(objects)
    }

    pub fn over(config: EmulatorConfig, backing: Backing) -> Self {
        let api = config.manners.api;
        let origin = OriginEmulator::start(config, backing);
        let mut user = User::new("one");
        let variables = match api {
            Api::S3 => vec![
                ("AWS_ACCESS_KEY_ID", "AKIATESTTEST".to_owned()),
                ("AWS_SECRET_ACCESS_KEY", "hunter2secret".to_owned()),
                ("AWS_REGION", "us-east-1".to_owned()),
                ("AWS_ENDPOINT_URL", origin.endpoint()),
            ],
            Api::Gcs => vec![
                ("GOOGLE_SERVICE_ACCOUNT_KEY", GCS_ACCOUNT.to_owned()),
                ("GOOGLE_ENDPOINT_URL", origin.endpoint()),
            ],
        };
        user.more.extend(variables);
        Bucket { user, origin }
    }

    fn filled(self, objects: &[(String, Vec<u8>)]) -> Self {
        for (key, bytes) in objects {
            self.origin.insert(&format!("set/{key}"), bytes.clone());
        }
        self
    }

    /// Returns the URI of the dataset.
    pub fn uri(&self) -> String {
        format!("{}/set", self.origin.uri())
    }

    /// Runs `index` or `pack`, with the tables in the folder `tables` of the home.
    pub fn read(&self, verb: &str, tables: &str, more: &[&str]) -> Said {
        let uri = self.uri();
        self.user.say(&[&[verb, &uri, "--tables", &self.user.text(tables), "--json"], more].concat())
    }

    /// Returns the entries of the version that a tag of some tables has. An empty directory ends in `/`.
    ///
    /// # Errors
    /// What `fletch ls` said: for example, that there is no such tag.
    pub fn entries(&self, tables: &str) -> Result<Vec<String>, String> {
        let (mut todo, mut found) = (vec![String::new()], Vec::new());
        let target = self.user.text(tables);
        while let Some(dir) = todo.pop() {
            let path: &[&str] = if dir.is_empty() { &[] } else { &[dir.trim_end_matches('/')] };
            let said = self.user.say(&[&["ls", &target, "--json"], path].concat());
            if said.code != 0 {
                return Err(said.stderr);
            }
            let listed: Value = serde_json::from_str(&said.stdout).map_err(|e| format!("{e}: {said:?}"))?;
            let children = listed["children"].as_array().cloned().unwrap_or_default();
            if children.is_empty() && !dir.is_empty() {
                found.push(dir.clone());
            }
            for child in children {
                let path = format!("{dir}{}", child["name"].as_str().unwrap_or_default());
                match child["kind"].as_str() {
                    Some("dir") => todo.push(format!("{path}/")),
                    _ => found.push(path),
                }
            }
        }
        found.sort();
        Ok(found)
    }

    /// Returns the entries that a mount of the dataset shows, with the bytes of files.
    pub fn mounted(&self, dir: &str) -> BTreeMap<String, Vec<u8>> {
        listed(&self.user.path(dir))
    }

    /// Returns what the origin holds for these entries.
    pub fn held(&self, entries: &[String]) -> BTreeMap<String, Vec<u8>> {
        let bytes = |key: &String| self.origin.object(&format!("set/{key}")).unwrap_or_default().to_vec();
        entries.iter().map(|key| (key.clone(), bytes(key))).collect()
    }

    /// Returns the GETs of the dataset's objects.
    pub fn gets(&self) -> u64 {
        self.origin.counts().get
    }
}

/// Returns the files of a directory with their bytes, and its empty directories with `/`.
pub fn listed(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    walk(dir, "", &mut found);
    found
}

fn walk(dir: &Path, at: &str, found: &mut BTreeMap<String, Vec<u8>>) {
    let mut empty = true;
    for entry in fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let entry = entry.expect("an entry");
        let path = format!("{at}{}", entry.file_name().to_string_lossy());
        empty = false;
        if entry.file_type().expect("a type").is_dir() {
            walk(&entry.path(), &format!("{path}/"), found);
        } else {
            let bytes = fs::read(entry.path()).unwrap_or_else(|e| panic!("{path}: {e}"));
            found.insert(path, bytes);
        }
    }
    if empty && !at.is_empty() {
        found.insert(at.to_owned(), Vec::new());
    }
}

/// Returns the faults of a run's JSON: the path and the reason of each.
pub fn faults(said: &Said) -> Vec<(String, String)> {
    let report: Value = serde_json::from_str(&said.stdout).unwrap_or_else(|e| panic!("{e}: {said:?}"));
    let list = report["faults"].as_array().or(report["skipped"].as_array()).cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    list.iter().map(|fault| (text(&fault["path"]), text(&fault["why"]))).collect()
}
