//! Limits of lines, paragraphs and sentences; names that left the tree; what a document may cite.
//!
//! Each limit is a test over the whole tree, beside a test that plants violations of it.

use fletch_tests::{
    bins::repo,
    names::{
        OLD_FILES, OLD_FUNCTIONS, OLD_TYPES, QUESTIONS, absent_paths, answers, old_names, outside_references,
        unanswered,
    },
    prose::{long_lines, long_paragraphs, long_sentences},
    tree::files,
};

/// Runs a check over every file and prints each offence.
fn hold(check: fn(&str, &str) -> Vec<String>, but: &[&str]) {
    let files = files();
    assert!(files.len() > 400, "only {} files: the tree was not read", files.len());
    let of_all = files.iter().filter(|f| !but.contains(&f.path.as_str()));
    let offences: Vec<String> = of_all.flat_map(|f| check(&f.path, &f.text)).collect();
    assert!(offences.is_empty(), "{} offences\n{}", offences.len(), offences.join("\n"));
}

#[test]
fn lines_are_short() {
    hold(long_lines, &[]);
}

#[test]
fn paragraphs_of_documents_and_comments_are_short() {
    hold(long_paragraphs, &[]);
}

#[test]
fn sentences_of_documents_are_short() {
    hold(long_sentences, &[]);
}

#[test]
fn old_names_are_gone() {
    hold(old_names, &[]);
}

/// The lists of what is forbidden name it.
#[test]
fn nothing_cites_a_document_outside_the_repository() {
    hold(outside_references, &["tests/harness/names.rs", "tests/integration/prose.rs"]);
}

#[test]
fn contributing_says_in_which_file_with_files_that_exist() {
    let contributing = std::fs::read_to_string(repo().join("CONTRIBUTING.md")).expect("CONTRIBUTING.md");
    let faults = unanswered(&contributing, |f| repo().join(f).is_file());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert_eq!(answers(&contributing).len(), QUESTIONS.len(), "one row a question");
    let absent = absent_paths("CONTRIBUTING.md", &contributing, |p| repo().join(p).exists());
    assert!(absent.is_empty(), "{}", absent.join("\n"));
}

#[test]
fn a_long_line_is_noticed() {
    let long = "x".repeat(111);
    let fits = "é".repeat(110);
    for path in ["a.rs", "a.py", "a.sh", "a.toml", "a.md", "Makefile", ".ci/run"] {
        assert_eq!(long_lines(path, &format!("{fits}\n{long}\n")), [format!("{path}:2: 111 characters")]);
    }
    assert!(long_lines("a.json", &long).is_empty());
    assert!(long_lines("tests/golden/a.md", &long).is_empty());
    assert!(long_lines("a.md", &format!("| {long} |")).is_empty());
    assert!(long_lines("a.rs", &format!("    /// | {long} |")).is_empty());
    assert!(!long_lines("a.rs", &format!("| {long} |")).is_empty());
    assert!(long_lines("a.md", &format!("[short]({long}) https://{long}")).is_empty());
    assert!(!long_lines("a.md", &format!("[{long}](short)")).is_empty());
}

#[test]
fn a_long_paragraph_is_noticed() {
    let seven = |prefix: &str| format!("{prefix} word\n").repeat(7);
    assert_eq!(
        long_paragraphs("a.md", &format!("# T\n\n{}", seven("a"))),
        ["a.md:3: a paragraph of 7 lines"]
    );
    assert_eq!(
        long_paragraphs("a.md", &format!("- item\n{}", seven(" "))),
        ["a.md:1: a paragraph of 8 lines"]
    );
    for free in [
        "word\n".repeat(6),
        seven("-"),
        seven("|"),
        seven("#"),
        format!("```\n{}```", seven("a")),
        "a\n\n".repeat(9),
    ] {
        assert!(long_paragraphs("a.md", &free).is_empty(), "{free}");
    }
    for mark in ["//", "///", "//!", "    ///"] {
        assert_eq!(long_paragraphs("a.rs", &seven(mark)), ["a.rs:1: a paragraph of 7 lines"], "{mark}");
    }
    assert_eq!(long_paragraphs("Makefile", &seven("#")).len(), 1);
    let docstring = format!("def f():\n    \"\"\"Does.\n\n{}    \"\"\"\n", seven("    a"));
    assert_eq!(long_paragraphs("a.py", &docstring), ["a.py:4: a paragraph of 7 lines"]);
    let fields = format!("\"\"\"Does.\n\nArgs:\n  one: it\n{}\"\"\"\n", seven("    a"));
    assert!(long_paragraphs("a.py", &fields).is_empty());
    assert!(long_paragraphs("a.py", &format!("X = \"\"\"\n{}\"\"\"\n", seven("a"))).is_empty());
    assert!(long_paragraphs("a.rs", &format!("/// - item\n{}", seven("///"))).is_empty());
    assert!(long_paragraphs("a.rs", &format!("//! I1 is kept:\n{}", seven("//!"))).is_empty());
    assert!(long_paragraphs("a.rs", &format!("/// ```text\n{}/// ```\n", seven("///"))).is_empty());
    assert!(long_paragraphs("a.rs", &seven("let x = 1; // y")).is_empty());
}

#[test]
fn a_long_sentence_is_noticed() {
    let words = |n: usize| "word ".repeat(n).trim().to_owned();
    let found = long_sentences("a.md", &format!("Short one. It has {}.\n", words(39)));
    assert_eq!(found, ["a.md:1: a sentence of 41 words: It has word word word word …"]);
    let over_lines = format!("Begin\n{}\n{}.", words(20), words(20));
    assert_eq!(long_sentences("a.md", &over_lines).len(), 1);
    assert_eq!(long_sentences("a.md", &format!("{}, e.g. {}.", words(30), words(30))).len(), 1);
    assert_eq!(long_sentences("a.md", &format!("- {}", words(41))).len(), 1);
    for free in [
        format!("{}. Then {}.", words(40), words(39)),
        format!("{}. `code` {}.", words(40), words(39)),
        format!("{} `{}` and [one]({}).", words(30), words(30), "a/b"),
        format!("| {} |", words(50)),
        format!("```\n{}\n```", words(50)),
        format!("# {}\n{}", words(30), words(30)),
    ] {
        assert_eq!(long_sentences("a.md", &free), Vec::<String>::new());
    }
    assert!(long_sentences("a.rs", &format!("// {}", words(50))).is_empty());
}

#[test]
fn every_old_name_is_noticed() {
    for (name, under) in OLD_TYPES {
        let rust = format!("{under}src/a.rs");
        assert_eq!(old_names(&rust, &format!("\nfn f(x: &[{name}]) {{}}")).len(), 1, "{name}");
        assert_eq!(old_names(&rust, &format!("/// See [`{name}::new`].\nfn f() {{}}")).len(), 1, "{name}");
        assert_eq!(old_names(&rust, &format!("// {name} is a word.\nfn f() {{ \"{name}\" }}")).len(), 0);
        assert_eq!(old_names(&rust, &format!("struct {name}s1;")).len(), 0, "{name}");
        if under.is_empty() {
            assert_eq!(old_names("a.py", &format!("x = '{name}' # {name}\ny = {name}()")).len(), 1, "{name}");
            assert_eq!(old_names("a.md", &format!("The type `{name}`, {name}.")).len(), 1, "{name}");
            assert!(old_names("CHANGELOG.md", &format!("`{name}`")).is_empty());
        } else {
            assert!(old_names("elsewhere_else/a.rs", &format!("struct {name};")).is_empty(), "{name}");
        }
    }
    for name in OLD_FUNCTIONS {
        assert_eq!(old_names("a.rs", &format!("pub fn {name}() {{}}")).len(), 1, "{name}");
        assert_eq!(old_names("a.py", &format!("def {name}(self): ...")).len(), 1, "{name}");
        assert_eq!(old_names("a.rs", &format!("fn f() {{ let {name} = 1; }}")).len(), 0, "{name}");
    }
    for (name, under) in OLD_FILES {
        assert_eq!(old_names(&format!("{under}src/{name}.rs"), "").len(), 1, "{name}");
        assert_eq!(old_names(&format!("{under}src/{name}/mod.rs"), "").len(), 1, "{name}");
        assert_eq!(old_names(&format!("{under}src/lib.rs"), &format!("mod {name};")).len(), 1, "{name}");
        assert_eq!(old_names(&format!("{under}src/{name}_new.rs"), "").len(), 0, "{name}");
    }
    assert!(OLD_TYPES.len() + OLD_FILES.len() > 40);
}

#[test]
fn a_document_outside_the_repository_is_noticed() {
    for cited in
        ["(DESIGN §7)", "see FACTS §2", "in `../shared/DESIGN.md`", "`shared/STYLE.md`", "below shared/."]
    {
        assert_eq!(outside_references("a.md", &format!("\nAs said {cited}.")).len(), 1, "{cited}");
    }
    for free in ["python/fletch/torch/shared.py", "node/shared/mod.rs", "a shared sweep", "shared/private.rs"]
    {
        assert!(outside_references("a.md", free).is_empty(), "{free}");
    }
}

#[test]
fn a_path_that_does_not_exist_is_noticed() {
    let text = "In `a/b.rs` and `/dev/fuse`, not `a/*.rs`, `make x` or `c.rs`.\n`d/e`";
    assert_eq!(absent_paths("x.md", text, |p| p == "d/e"), ["x.md:1: there is no a/b.rs"]);
    assert_eq!(absent_paths("x.md", text, |p| p == "a/b.rs"), ["x.md:2: there is no d/e"]);
}

#[test]
fn an_answer_that_is_no_file_is_noticed() {
    let head = "# C\n\n## In which file?\n\n| question | file |\n|---|---|\n";
    let rows: String = QUESTIONS.iter().map(|q| format!("| {q} | `a.rs`, then `b.rs` |\n")).collect();
    let all = format!("{head}{rows}\n## Next\n\n| x | `y` |\n");
    assert!(unanswered(&all, |_| true).is_empty());
    assert_eq!(answers(&all).len(), QUESTIONS.len());
    assert_eq!(unanswered(&all, |f| f != "b.rs").len(), QUESTIONS.len());
    assert_eq!(unanswered(&all.replace("| eviction |", "| other |"), |_| true).len(), 1);
    assert_eq!(unanswered(&all.replace("| `a.rs`, then `b.rs` |", "| |"), |_| true).len(), QUESTIONS.len());
}
