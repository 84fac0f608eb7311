//! On a server without tokens, the user at the other end of the unix socket decides who may change anything.

use fletch_tests::bins::{bin, run, without_variables};
use fletch_tests::fixture::{Site, index};
use fletch_tests::require::{Need, have};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

const OTHER: &str = "4242";

/// Runs the copy of `fletch` beside the socket as another user, who is in the socket's group.
fn fletch_as_other(site: &Site, args: &[&str]) -> Output {
    let program = site.socket().with_file_name("fletch");
    let server = format!("unix:{}", site.socket().display());
    let mut c = without_variables(Command::new("setpriv"));
    c.args(["--reuid", OTHER, "--regid", "0", "--clear-groups", "--"]).arg(program).args(args);
    c.args(["--server", &server]).output().expect("setpriv runs")
}

/// Starts a server whose socket the group may open.
fn site(more: &[&str]) -> Site {
    let site = Site::start(more);
    let scratch = site.socket().parent().map(Path::to_owned).expect("scratch");
    fs::set_permissions(&scratch, Permissions::from_mode(0o755)).expect("chmod");
    fs::copy(bin("fletch"), scratch.join("fletch")).expect("copy of the program");
    site
}

#[test]
fn another_user_of_the_machine_reads_by_the_socket_and_a_named_one_writes() {
    if !have(&[Need::Root]) {
        return;
    }
    let home = TempDir::with_prefix("fletch-peers-").expect("home");
    fs::write(home.path().join("a.bin"), vec![7; 40_000]).expect("write");
    let tables = TempDir::with_prefix("fletch-peers-").expect("tables");
    let _root = index(home.path(), tables.path(), &[]);
    let (uri, at) = (home.path().display().to_string(), tables.path().display().to_string());
    let register =
        |name: &str| vec!["register".to_owned(), name.to_owned(), uri.clone(), "--tables".into(), at.clone()];
    let as_other = |site: &Site, args: &[String]| {
        fletch_as_other(site, &args.iter().map(String::as_str).collect::<Vec<_>>())
    };

    let plain = site(&[]);
    let denied = as_other(&plain, &register("d"));
    let told = String::from_utf8_lossy(&denied.stderr).into_owned();
    assert_eq!(denied.status.code(), Some(5), "{told}");
    assert!(told.contains("role reader") && told.contains("auth.socket_admins"), "{told}");
    // The user that runs the server is an admin there.
    let socket = format!("unix:{}", plain.socket().display());
    run(without_variables(Command::new(bin("fletch"))).args(register("d")).args(["--server", &socket]));
    let listed = as_other(&plain, &["datasets".to_owned()]);
    assert!(listed.status.success() && listed.stdout.starts_with(b"d"), "{listed:?}");
    let listed = as_other(&plain, &["ls".to_owned(), "d".to_owned()]);
    assert!(
        listed.status.success() && String::from_utf8_lossy(&listed.stdout).contains("a.bin"),
        "{listed:?}"
    );
    let denied = as_other(&plain, &["unregister".to_owned(), "d".to_owned()]);
    assert_eq!(denied.status.code(), Some(5), "{denied:?}");

    let named = site(&["--auth-socket-admins", OTHER]);
    let made = as_other(&named, &register("d"));
    assert!(made.status.success(), "{made:?}");
    let gone = as_other(&named, &["unregister".to_owned(), "d".to_owned()]);
    assert!(gone.status.success(), "{gone:?}");
}
