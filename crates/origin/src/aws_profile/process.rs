//! Runs the program of a `credential_process`, with bounds on its time and its output.

use super::provider::Fetched;
use super::time;
use crate::transport::credentials_client::NoCredentials;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use object_store::aws::AwsCredential;
use serde::Deserialize;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

/// The longest time of a program. It may ask a person for a code.
const WITHIN: Duration = Duration::from_secs(60);
/// The most bytes that a program may print.
const OUTPUT_BYTES_MAX: u64 = 64 << 10;

/// What a program prints (version 1 of AWS's form).
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    version: u32,
    access_key_id: Option<String>,
    secret_access_key: Option<String>,
    session_token: Option<String>,
    expiration: Option<String>,
}

/// Runs the command of a profile and reads the credentials that it prints. Blocks.
///
/// The shell reads the command, as AWS's libraries let it. Its errors are not shown: they may have secrets.
pub(super) fn run(profile: &str, command: &str) -> Result<Fetched, NoCredentials> {
    run_within(profile, command, WITHIN)
}

fn run_within(profile: &str, command: &str, within: Duration) -> Result<Fetched, NoCredentials> {
    let failed = |why: &str| NoCredentials {
        why: format!(
            "the credential_process of the AWS profile {profile} {why}; run its command to see the cause"
        ),
        transient: false,
    };
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(command).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    // A group of its own, so that everything that it started can be ended.
    let mut child = shell.process_group(0).spawn().map_err(|e| failed(&format!("cannot start: {e}")))?;
    let Some(output) = child.stdout.take() else { return Err(failed("has no output")) };
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let read = output.take(OUTPUT_BYTES_MAX + 1).read_to_end(&mut text).map(|_| text);
        // Nobody receives it after the deadline.
        send.send(read).ok();
    });
    let text = match receive.recv_timeout(within) {
        Ok(Ok(text)) => text,
        Ok(Err(e)) => {
            end(&mut child);
            return Err(failed(&format!("cannot be read: {e}")));
        }
        Err(_) => {
            end(&mut child);
            return Err(failed(&format!("printed no credentials within {within:?}")));
        }
    };
    if text.len() as u64 > OUTPUT_BYTES_MAX {
        end(&mut child);
        return Err(failed(&format!("printed more than {OUTPUT_BYTES_MAX} bytes")));
    }
    // It closed its output: it ends soon, or is ended.
    let until = std::time::Instant::now() + within.min(Duration::from_secs(5));
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if std::time::Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(None) | Err(_) => {
                end(&mut child);
                break None;
            }
        }
    };
    if let Some(status) = status.filter(|status| !status.success()) {
        return Err(failed(&format!("failed ({status})")));
    }
    read(&text).map_err(failed)
}

/// Ends the program and everything that it started.
fn end(child: &mut Child) {
    if let Ok(id) = i32::try_from(child.id()) {
        // It may have ended by itself.
        killpg(Pid::from_raw(id), Signal::SIGKILL).ok();
    }
    child.wait().ok();
}

fn read(text: &[u8]) -> Result<Fetched, &'static str> {
    // The text of a parser's error would quote what was printed.
    let printed: Printed = serde_json::from_slice(text).map_err(|_| "printed no JSON of AWS's form")?;
    if printed.version != 1 {
        return Err("printed another Version than 1");
    }
    let (Some(key_id), Some(secret_key)) = (printed.access_key_id, printed.secret_access_key) else {
        return Err("printed no AccessKeyId and SecretAccessKey");
    };
    let expires = match printed.expiration {
        None => None,
        Some(text) => Some(time::parse(&text).ok_or("printed an Expiration that is no time")?),
    };
    let keys = Arc::new(AwsCredential { key_id, secret_key, token: printed.session_token });
    Ok(Fetched { keys, expires })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Instant, SystemTime};

    #[test]
    fn a_program_prints_credentials() {
        let command = r#"echo '{"Version": 1, "AccessKeyId": "id", "SecretAccessKey": "hunter2",
            "SessionToken": "t", "Expiration": "1970-01-01T00:00:07Z"}'"#;
        let got = run("p", command).expect("credentials");
        assert_eq!((got.keys.key_id.as_str(), got.keys.token.as_deref()), ("id", Some("t")));
        assert_eq!(got.expires, Some(SystemTime::UNIX_EPOCH + Duration::from_secs(7)));
    }

    #[test]
    fn a_bad_program_is_named_without_its_words() {
        for (command, why) in [
            ("echo hunter2 >&2; exit 3", "failed (exit status: 3)"),
            ("echo hunter2", "no JSON"),
            (r#"echo '{"Version": 2}'"#, "another Version"),
            (r#"echo '{"Version": 1, "AccessKeyId": "hunter2"}'"#, "no AccessKeyId and"),
            (
                r#"echo '{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b",
                    "Expiration": "hunter2"}'"#,
                "no time",
            ),
            ("yes hunter2", "more than 65536 bytes"),
            ("/none/hunter2", "failed (exit status: 127)"),
        ] {
            let error = run("p", command).expect_err(command);
            assert!(error.why.contains(why) && !error.why.contains("hunter2"), "{command}: {error}");
            assert!(error.why.contains("AWS profile p ") && !error.transient, "{error}");
        }
    }

    #[test]
    fn a_program_that_hangs_is_ended_with_what_it_started() {
        let dir = tempfile::tempdir().expect("tempdir");
        let mark = dir.path().join("mark");
        let command = format!("(sleep 1; touch {}) & sleep 60", mark.display());
        let begun = Instant::now();
        let error = run_within("p", &command, Duration::from_millis(200)).expect_err("it hangs");
        assert!(begun.elapsed() < Duration::from_secs(5) && error.why.contains("within 200ms"), "{error}");
        std::thread::sleep(Duration::from_millis(1500));
        assert!(!mark.exists(), "its child lives");
    }
}
