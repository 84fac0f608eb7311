//! What users set of a job, in a file of its own beside the record, so that a change rewrites no long plan.
//!
//! A change is durable before it is answered and before anything uses it. A file that cannot be read is
//! logged, and the job has the defaults until its settings are set again.

use crate::training::epochs::JobError;
use fletch_api::{JobSettings, allocation::check_weight};
use fletch_host::replace::replace_file;
use parking_lot::Mutex;
use std::{
    io,
    path::{Path, PathBuf},
};

/// The name of the file in its job's directory.
const SETTINGS_FILE: &str = "settings.json";

/// The settings of a job, in memory and on disk.
#[derive(Debug)]
pub struct StoredSettings {
    path: PathBuf,
    now: Mutex<JobSettings>,
}

impl StoredSettings {
    /// Reads the settings in a job's directory. Blocking.
    pub(super) fn read(dir: &Path) -> Self {
        let path = dir.join(SETTINGS_FILE);
        let read = std::fs::read(&path).and_then(|b| serde_json::from_slice(&b).map_err(io::Error::from));
        let now = read.unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::error!(
                    file = %path.display(), %error,
                    "the settings of a job cannot be read; it has the defaults until they are set again"
                );
            }
            JobSettings::default()
        });
        StoredSettings { path, now: Mutex::new(now) }
    }

    /// Returns the settings of a job whose directory does not exist yet.
    pub(super) fn of_new(dir: &Path) -> Self {
        StoredSettings { path: dir.join(SETTINGS_FILE), now: Mutex::default() }
    }

    #[must_use]
    pub fn get(&self) -> JobSettings {
        *self.now.lock()
    }

    /// Replaces the settings. Durable when this returns. Blocking.
    pub(super) fn set(&self, new: JobSettings) -> Result<(), JobError> {
        let failed = |error| JobError::Io { path: self.path.clone(), error };
        let bytes = serde_json::to_vec(&new).map_err(|e| failed(e.into()))?;
        replace_file(&self.path, &bytes).map_err(failed)?;
        *self.now.lock() = new;
        Ok(())
    }
}

/// Checks settings by themselves.
pub(super) fn check(new: JobSettings) -> Result<(), JobError> {
    new.weight.map_or(Ok(()), check_weight).map_err(JobError::BadSettings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_back_and_a_damaged_file_costs_no_job() {
        let dir = tempfile::tempdir().expect("a directory");
        let new = JobSettings { weight: Some(2.5), min_share_bytes: Some(7) };
        StoredSettings::of_new(dir.path()).set(new).expect("written");
        assert_eq!(StoredSettings::read(dir.path()).get(), new);
        std::fs::write(dir.path().join(SETTINGS_FILE), "{\"weight\":").expect("written");
        assert_eq!(StoredSettings::read(dir.path()).get(), JobSettings::default());
    }

    #[test]
    fn a_weight_that_no_division_can_use_is_refused_with_the_range() {
        for weight in [-1.0, 0.0, f64::NAN, f64::INFINITY, 1e9] {
            let told = check(JobSettings { weight: Some(weight), ..JobSettings::default() });
            let told = told.expect_err("refused").to_string();
            assert!(told.contains("within 0.001 and 1000"), "{told}");
        }
        assert!(check(JobSettings { weight: Some(0.5), ..JobSettings::default() }).is_ok());
        assert!(check(JobSettings::default()).is_ok());
    }
}
