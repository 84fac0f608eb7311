//! The contributor's kit: targets that exist, and a table of what `make test` installs.

use fletch_tests::{
    bins::{repo, run},
    kit::{installed, npm_packages, phantoms, phony, targets, unknown_targets, untold},
    require::{Need, have},
    tree::{Language, files, language},
};
use std::{collections::BTreeSet, process::Command};

fn read(path: &str) -> String {
    std::fs::read_to_string(repo().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

#[test]
fn every_target_is_phony_and_in_help() {
    let help = run(Command::new("make").args(["-s", "help"]).env_remove("MAKEFLAGS").current_dir(repo()));
    let faults = phantoms(&read("Makefile"), &String::from_utf8_lossy(&help.stdout));
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn documents_call_targets_that_exist() {
    let makefile = read("Makefile");
    let documents = files().into_iter().filter(|f| language(&f.path) == Language::Markdown);
    let faults: Vec<String> = documents.flat_map(|f| unknown_targets(&f.path, &f.text, &makefile)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn what_is_installed_is_in_the_table() {
    let requirements = read("tests/formats/requirements.txt") + &read("tests/chart/requirements.in");
    let requirements = requirements + &npm_packages(&read("cache-server/page/package.json"));
    let installed = installed(&read("tests/install.sh"), &requirements);
    assert!(installed.len() > 20, "{installed:?}");
    let faults = untold(&installed, &read("tests/README.md"), "What `make test` installs");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// `.pre-commit-config.yaml` runs make targets only, so that a hook and CI agree.
#[test]
fn hooks_call_make() {
    let hooks = read(".pre-commit-config.yaml");
    let entries: Vec<&str> = hooks.lines().filter_map(|l| l.trim().strip_prefix("entry: ")).collect();
    assert!(!entries.is_empty());
    let makefile = read("Makefile");
    for entry in entries {
        let name = entry.strip_prefix("make ").unwrap_or_else(|| panic!("a hook runs {entry:?}"));
        assert!(targets(&makefile).iter().any(|t| t.name == name), "no target {name}");
    }
    assert!(!hooks.contains("https://"), "a hook is fetched");
}

/// Runs `tests/audit/lost_tests.py` and returns its exit code and its output.
fn lost_tests(before: &str, after: &str, renames: &str) -> (i32, String) {
    let dir = tempfile::tempdir().expect("scratch");
    let mut command = Command::new("python3");
    command.arg(repo().join("tests/audit/lost_tests.py"));
    for (name, text) in [("before", before), ("after", after), ("renames", renames)] {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("write");
        command.arg(path);
    }
    let out = command.output().expect("python3");
    (out.status.code().expect("exit code"), String::from_utf8_lossy(&out.stdout).into_owned())
}

#[test]
fn a_lost_test_is_noticed() {
    if !have(&[Need::Python]) {
        return;
    }
    let before = "pkg m::one\npkg m::two\npkg::bin two\n";
    assert_eq!(lost_tests(before, before, "").0, 0);
    assert_eq!(lost_tests(before, "pkg::bin new::two\nother one\npkg two\n", "").0, 0);
    assert_eq!(lost_tests(before, "pkg m::one\npkg m::two\npkg m::first\n", "# why\nx::two -> first\n").0, 0);
    for (after, renames) in [
        ("pkg m::one\npkg m::two\n", ""),
        ("pkg m::one\npkg m::two\n", "two -> one\n"),
        ("pkg m::one\npkg m::two\npkg m::first\n", ""),
    ] {
        let (code, printed) = lost_tests(before, after, renames);
        assert_eq!(code, 1, "{after}{renames}{printed}");
        assert!(printed.contains("lost: two"), "{printed}");
    }
    assert_eq!(lost_tests(before, before, "gone -> one\n").0, 2);
    assert_eq!(lost_tests("", before, "").0, 1);
}

#[test]
fn a_phantom_target_is_noticed() {
    let sound = "X := 1\n.PHONY: a \\\n  b\na: b ## does a\n\tcmd: x\nb: ## does b\na: export Y := 1\n";
    assert_eq!(phony(sound), BTreeSet::from(["a".to_owned(), "b".to_owned()]));
    assert_eq!(targets(sound).len(), 2);
    assert!(phantoms(sound, "a  does a\nb  does b\n").is_empty());
    for (makefile, help) in [
        (sound.replace("  b\n", "  b c\n"), "a\nb\n"),
        (sound.replace("  b\n", "\n"), "a\nb\n"),
        (sound.replace(" ## does b", ""), "a\n"),
        (sound.to_owned(), "a\n"),
        (sound.to_owned(), "a\nb\nc\n"),
    ] {
        assert_eq!(phantoms(&makefile, help).len(), 1, "{makefile}{help}");
    }
}

#[test]
fn a_call_of_no_target_is_noticed() {
    let makefile = "a: ## does\nb-c: ## does\n";
    assert!(
        unknown_targets("x.md", "`make a`, `make X=1 b-c`\n```sh\n$ make a\nmake b-c Y=2\n```", makefile)
            .is_empty()
    );
    assert!(unknown_targets("x.md", "make sure; `make NAME`; `make accept-NAME`", makefile).is_empty());
    assert_eq!(unknown_targets("x.md", "`make d`\n```\nmake e\n```", makefile).len(), 2);
}

#[test]
fn an_untold_package_is_noticed() {
    let script = "need a pack-a\nPATH=\"x\" need b pack-b\nif y; then missing+=(pack-c pack-d); fi\n\
                  need() { missing+=(\"$2\"); }\n# need z z\n    cargo install --locked tool\n\
                  \"$v/bin/pip\" install --quiet 'py[server]==5.2.*' 'other<2'\n\
                  npm install --prefix \"$x\" 'js@3.35'\n\
                  (cd x && apt-get download -qq icons 2>/dev/null)\n";
    let found = installed(script, "req==1.0\n");
    let all = ["icons", "js", "other", "pack-a", "pack-b", "pack-c", "pack-d", "py", "req", "tool"];
    assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), all);
    let rows: String = all.iter().map(|p| format!("| `{p}` | why |\n")).collect();
    let document = format!("# T\n\n## Installs\n\n| package | why |\n|---|---|\n{rows}\n## Other\n");
    assert!(untold(&found, &document, "Installs").is_empty());
    assert_eq!(untold(&found, &document.replace("`tool`", "`tools`"), "Installs").len(), 2);
    assert_eq!(untold(&found, &document, "Nothing").len(), all.len());
}
