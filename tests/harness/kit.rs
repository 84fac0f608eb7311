//! The contributor's kit as text: the targets of the Makefile, and what `make test` installs.

use std::collections::BTreeSet;

/// A target of the Makefile, and whether `make help` lists it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// Name.
    pub name: String,
    /// Whether its rule ends in `## text`.
    pub helped: bool,
}

/// Returns the targets that have a rule.
#[must_use]
pub fn targets(makefile: &str) -> BTreeSet<Target> {
    let rules = makefile.lines().filter_map(|line| {
        let (name, rest) = line.split_once(':')?;
        let word =
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        let variable = rest.starts_with('=') || rest.trim_start().starts_with("export ");
        (word && !variable).then(|| Target { name: name.to_owned(), helped: rest.contains(" ## ") })
    });
    rules.collect()
}

/// Returns the names that `.PHONY` lists.
#[must_use]
pub fn phony(makefile: &str) -> BTreeSet<String> {
    let joined = makefile.replace("\\\n", " ");
    let lists = joined.lines().filter_map(|l| l.strip_prefix(".PHONY:"));
    lists.flat_map(str::split_whitespace).map(str::to_owned).collect()
}

/// Returns the differences between the rules, `.PHONY`, and the lines that `make help` prints.
#[must_use]
pub fn phantoms(makefile: &str, help: &str) -> Vec<String> {
    let targets = targets(makefile);
    let phony = phony(makefile);
    let printed: BTreeSet<&str> = help.lines().filter_map(|l| l.split_whitespace().next()).collect();
    let mut out = Vec::new();
    for name in &phony {
        if !targets.iter().any(|t| t.name == *name) {
            out.push(format!("Makefile: .PHONY lists {name}, which has no rule"));
        }
    }
    for t in &targets {
        if !phony.contains(&t.name) {
            out.push(format!("Makefile: {} is not in .PHONY", t.name));
        }
        if !t.helped {
            out.push(format!("Makefile: {} has no `## text`", t.name));
        } else if !printed.contains(t.name.as_str()) {
            out.push(format!("Makefile: `make help` does not print {}", t.name));
        }
    }
    let known = |name: &&&str| !targets.iter().any(|t| t.name == **name);
    out.extend(printed.iter().filter(known).map(|p| format!("`make help` prints {p}, which has no rule")));
    out
}

/// Returns the targets that a document's code calls and the Makefile has not.
#[must_use]
pub fn unknown_targets(path: &str, text: &str, makefile: &str) -> Vec<String> {
    let targets = targets(makefile);
    let mut out = Vec::new();
    let mut fenced = false;
    for (i, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        let spans: Vec<&str> = if fenced {
            vec![line.trim_start_matches("$ ")]
        } else {
            line.split('`').skip(1).step_by(2).collect()
        };
        for called in spans.iter().filter_map(|s| s.trim().strip_prefix("make ")) {
            let name = called.split_whitespace().find(|w| !w.contains('=') && !w.starts_with('-'));
            let Some(name) =
                name.filter(|n| n.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'))
            else {
                continue;
            };
            if !targets.iter().any(|t| t.name == name) {
                out.push(format!("{path}:{}: the Makefile has no target {name}", i + 1));
            }
        }
    }
    out
}

/// Returns the packages of a `package.json`, one a line, with their versions.
///
/// # Panics
/// If it is not valid.
#[must_use]
pub fn npm_packages(package: &str) -> String {
    let package: serde_json::Value = serde_json::from_str(package).expect("package.json");
    let lists = ["dependencies", "devDependencies"].into_iter().filter_map(|list| package[list].as_object());
    let lines = lists.flatten().map(|(name, version)| format!("\n{name}={}", version.as_str().unwrap_or("")));
    lines.collect()
}

/// Returns the packages that `tests/install.sh` and requirements files install, from any registry.
#[must_use]
pub fn installed(install: &str, requirements: &str) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    let install = &install.replace("\\\n", " ");
    for line in install.lines().map(str::trim).filter(|l| !l.starts_with('#')) {
        let line =
            line.split_once("need ").filter(|(before, _)| before.is_empty() || before.starts_with("PATH="));
        if let Some(package) = line.and_then(|(_, rest)| rest.split_whitespace().nth(1)) {
            out.insert(package.to_owned());
        }
    }
    for (before, after) in
        [("missing+=(", ")"), ("cargo install --locked ", "\n"), ("apt-get download -qq ", " ")]
    {
        for (at, m) in install.match_indices(before) {
            let rest = &install[at + m.len()..];
            let list = &rest[..rest.find(after).unwrap_or(rest.len())];
            let names = list.split_whitespace().filter(|w| w.starts_with(|c: char| c.is_ascii_lowercase()));
            out.extend(names.map(str::to_owned));
        }
    }
    let quoted = install.lines().filter(|l| l.contains("pip\" install") || l.contains("npm install"));
    let pinned = quoted.flat_map(|l| l.split('\'').skip(1).step_by(2)).chain(requirements.lines());
    out.extend(pinned.filter_map(|p| p.split(['=', '<', '>', '~', '!', '@', '[']).next()).map(str::to_owned));
    out.retain(|p| !p.is_empty());
    out
}

/// Returns the differences between what is installed and the table below the heading of a document: its
/// first column names the packages, in code spans.
#[must_use]
pub fn untold(installed: &BTreeSet<String>, document: &str, heading: &str) -> Vec<String> {
    let section = document.split("\n## ").find(|s| s.starts_with(heading)).unwrap_or("");
    let rows = section.lines().filter(|l| l.starts_with('|')).skip(2);
    let first = rows.filter_map(|r| r.trim_matches('|').split('|').next());
    let told: BTreeSet<String> =
        first.flat_map(|c| c.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()).collect();
    let missing = installed.difference(&told).map(|p| format!("{p} is installed and not in the table"));
    missing
        .chain(told.difference(installed).map(|p| format!("{p} is in the table and not installed")))
        .collect()
}
