"""The page in a real Chromium: every view of real runs, its keys, its sizes, light and dark."""

import pytest

import golden_kit
from browser_kit import Tab, part

pytestmark = pytest.mark.slow

SIZES = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture
def tab(browser, page):
    made = Tab(browser, page.link)
    yield made
    made.page.context.close()
    assert made.said == []


def rows(page, run, what, **query):
    path = f"/api/runs/{part(run)}/{what}?" + "&".join(f"{k}={part(v)}" for k, v in query.items())
    return page.get(path).json()["rows"]


def addresses(page, run):
    """Return an address of every view of a run, with the token lens in several colours."""
    row = rows(page, run, "rollouts", sort="-num_calls", limit=1)[0]
    name = f"{part(row['request_id'])}/{row['trajectory_index']}"
    base = f"#/run/{part(run)}"
    found = [base, f"{base}/rollouts", f"{base}/rollouts?by=group", f"{base}/rollout/{name}"]
    found += [f"{base}/rollouts?sort=-breaks", f"{base}/evaluation/{part(row['phase'])}"]
    found += [f"{base}/tokens/{name}/0", f"{base}/tree/{name}"]
    colours = ("logprob", "advantage", "entropy", "difference", "version", "loss_weight")
    found += [f"{base}/tokens/{name}/0?colour={colour}" for colour in colours]
    groups = rows(page, run, "groups", limit=1)
    if groups:
        group = part(groups[0]["group_id"])
        found += [f"{base}/group/{group}", f"{base}/tree/{group}"]
    return found


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_every_view_is_readable(browser, page, width, scheme):
    tab = Tab(browser, page.link, width, scheme)
    compare = "#/compare?arm=train%3Aeval_before&arm=train%3Aeval_after&arm=train%3Atrain"
    places = [
        "#/?q=",
        compare,
        *(each for run in ("train", "tools") for each in addresses(page, run)),
    ]
    for place in places:
        tab.open(place)
        found = tab.looked()
        assert found == {"pale": [], "overflow": 0, "hacked": None}, place
        assert tab.texts(".error[role=alert]") == [], place
    tab.page.context.close()
    assert tab.said == []


def test_the_front_page_lists_the_runs(tab):
    assert sorted(tab.texts("tbody th a")) == ["deep/agents", "tools", "train"]
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("letters")
    assert tab.texts("tbody th a") == ["train"]
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("Enter")
    tab.ready("#/run/train")
    assert tab.texts("h1") == ["train"]


def test_keys_lead_through_a_run(tab):
    tab.open("#/run/train/rollouts")
    for _ in range(3):
        tab.page.keyboard.press("j")
    tab.page.keyboard.press("k")
    marked = tab.page.locator(".vrow.marked a")
    address = marked.get_attribute("href")
    assert marked.count() == 1
    tab.page.keyboard.press("Enter")
    tab.ready(address)
    tab.page.keyboard.press("u")
    tab.ready("#/run/train/rollouts")
    tab.page.keyboard.press("u")
    tab.ready("#/run/train")
    tab.page.keyboard.press("?")
    assert "next and previous row" in tab.page.locator("dialog[open]").inner_text()
    tab.page.keyboard.press("Escape")
    assert tab.page.locator("dialog[open]").count() == 0
    before = tab.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    tab.page.keyboard.press("t")
    assert tab.page.evaluate("() => getComputedStyle(document.body).backgroundColor") != before


def test_the_token_leaves_the_address_and_links_open_in_new_tabs(tab):
    assert "token" not in tab.page.url
    other = tab.page.context.new_page()
    other.goto(tab.page.url.partition("#")[0] + "#/run/train/rollouts")
    other.wait_for_selector(".vrow[data-row]")


def test_rollouts_are_filtered_and_sorted(tab, page):
    tab.open("#/run/train/rollouts")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("reward >= 0.5")
    tab.page.keyboard.press("Enter")
    tab.ready("#/run/train/rollouts?where=reward+%3E%3D+0.5")
    wanted = rows(page, "train", "rollouts", where="reward >= 0.5", limit=500)
    assert tab.page.locator(".vtable").get_attribute("aria-rowcount") == str(len(wanted))
    tab.page.get_by_role("button", name="reward").click()
    tab.ready("#/run/train/rollouts?where=reward+%3E%3D+0.5&sort=-reward")
    shown = [float(text) for text in tab.texts(".vbody .vrow .reward")]
    assert shown == sorted(shown, reverse=True)
    tab.open("#/run/train/rollouts?where=rewrad+%3E+1")
    assert "reward" in tab.page.locator(".error").inner_text()
    tab.said.clear()  # the browser's own word on the answer 400


def test_curves_have_values_and_a_zoom(tab, page):
    tab.open("#/run/train")
    curves = page.get("/api/runs/train/curves").json()
    plot = tab.page.locator(".chart .plot").first
    plot.focus()
    tab.page.keyboard.press("ArrowRight")
    assert f"step {curves['steps'][0]}" in tab.page.locator(".bar [role=status]").inner_text()
    box = plot.bounding_box()
    y = box["y"] + box["height"] / 2
    tab.page.mouse.move(box["x"] + 0.5 * box["width"], y)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 0.98 * box["width"], y, steps=3)
    tab.page.mouse.up()
    ticks = (
        tab.page.locator(".chart").first.locator(".tick[text-anchor=middle]").all_text_contents()
    )
    assert "0" not in ticks
    tab.page.keyboard.press("Escape")
    steps = tab.page.locator(".chart").first.locator(".tick[text-anchor=middle]")
    assert "0" in steps.all_text_contents()


def test_the_token_lens_tells_what_a_token_was_paid(tab, page):
    row = rows(page, "train", "rollouts", phase="train", where="status = ok", limit=1)[0]
    name = f"{part(row['request_id'])}/{row['trajectory_index']}"
    query = f"id={part(row['request_id'])}&index={row['trajectory_index']}&call=0"
    lens = page.get(f"/api/runs/train/tokens?{query}").json()
    at = lens["is_sampled"].index(True)
    tab.open(f"#/run/train/tokens/{name}/0")
    assert tab.page.locator(".tk[data-at]").count() == lens["num_tokens"]
    assert tab.page.locator(".tk.sampled[data-at]").count() == sum(lens["is_sampled"])
    tab.page.locator(f'[data-at="{at}"]').click()
    said = tab.page.locator(".inspector").inner_text()
    assert f"id {lens['ids'][at]}" in said
    assert "advantage" in said
    tab.page.get_by_label("Colour by").select_option("advantage")
    kinds = {"plus" if value >= 0 else "minus" for value in lens["advantage"] if value is not None}
    shown = tab.page.locator(f'[data-at="{at}"]').get_attribute("class").split()
    assert kinds & set(shown)


def test_a_break_shows_both_sides(tab, page):
    broken = None
    for row in rows(page, "tools", "rollouts", limit=500):
        query = f"id={part(row['request_id'])}&index={row['trajectory_index']}"
        found = page.get(f"/api/runs/tools/rollout?{query}").json()
        if found["breaks"]:
            broken = row, found["breaks"][0]
            break
    assert broken, "no rollout of this run has a break"
    row, found = broken
    name = f"{part(row['request_id'])}/{row['trajectory_index']}"
    tab.open(f"#/run/tools/rollout/{name}")
    card = tab.page.locator(".break").first
    assert found["cause"].replace("_", " ") in card.inner_text()
    assert card.locator(".card").count() == 2
    card.locator("a").first.click()
    tab.ready(f"#/run/tools/tokens/{name}/{found['call']}?at={found['position']}")
    assert tab.page.locator(".mark").count() == 1


def test_a_group_is_one_tree_with_its_rewards(tab, page):
    group = rows(page, "train", "groups", phase="train", limit=1)[0]
    tab.open(f"#/run/train/group/{part(group['group_id'])}")
    assert tab.page.locator(".ending").count() == len(group["rewards"])
    assert "all" in tab.page.locator(".branchhead").first.inner_text()
    tab.open(f"#/run/train/tree/{part(group['group_id'])}")
    tab.page.locator(".picture a").first.click()
    tab.page.wait_for_selector(".tk[data-at]")


def test_only_the_rows_that_are_seen_exist(browser, start, tmp_path):
    golden_kit.unpack("demo-seed1", tmp_path / "demo")
    tab = Tab(browser, start(tmp_path / "demo").link)
    tab.open("#/run/demo/rollouts")
    box = tab.page.locator(".vtable")
    total = int(box.get_attribute("aria-rowcount"))
    assert total > 200
    tab.page.evaluate("() => { document.querySelector('.vtable').scrollTop = 1e9; }")
    tab.page.wait_for_selector(f'.vrow[data-row][aria-rowindex="{total + 1}"]')
    assert tab.page.locator(".vbody .vrow").count() < 80
    tab.page.context.close()
    assert tab.said == []


def test_rows_stay_in_order_wherever_one_scrolls(tab, page):
    tab.open("#/run/train/rollouts?sort=-total_ms")
    wanted = [
        row["request_id"] for row in rows(page, "train", "rollouts", sort="-total_ms", limit=999)
    ]
    for _ in range(4):
        tab.page.keyboard.press("j")
    for top in (0, 1e9, 640, 900, 300, 0):
        shown = tab.page.evaluate(
            """async (top) => {
              document.querySelector(".vtable").scrollTop = top;
              await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
              const place = (row) => Number(row.getAttribute("aria-rowindex")) - 2;
              const rows = [...document.querySelectorAll(".vbody .vrow")];
              return rows.map((row) => [place(row), row.querySelector("a").textContent]);
            }""",
            top,
        )
        places = [at for at, _ in shown]
        assert places == list(range(places[0], places[0] + len(places)))
        assert all(text.startswith(wanted[at]) for at, text in shown)
    assert tab.page.locator(".vrow.marked").get_attribute("aria-rowindex") == "5"


def test_an_address_names_one_token(tab, page):
    row = rows(page, "train", "rollouts", phase="train", where="status = ok", limit=1)[0]
    tab.open(f"#/run/train/tokens/{part(row['request_id'])}/{row['trajectory_index']}/0?at=3")
    assert tab.page.locator(".tk.chosen").get_attribute("data-at") == "3"
    assert "position 3" in tab.page.locator(".inspector").inner_text()


@pytest.mark.parametrize(("width", "is_beside"), [(1280, True), (390, False)])
def test_the_conversation_stands_first(browser, page, width, is_beside):
    tab = Tab(browser, page.link, width)
    row = rows(page, "tools", "rollouts", sort="-num_calls", limit=1)[0]
    tab.open(f"#/run/tools/rollout/{part(row['request_id'])}/{row['trajectory_index']}")
    said = tab.page.locator(".conversation").bounding_box()
    numbers = tab.page.locator("aside").bounding_box()
    assert said["y"] < tab.page.viewport_size["height"] / 2
    if is_beside:
        assert numbers["x"] > said["x"] + said["width"]
    else:
        assert numbers["y"] > said["y"] + said["height"]
    tab.page.context.close()
    assert tab.said == []


def test_groups_open_with_those_of_the_newest_step(tab, page):
    tab.open("#/run/train/rollouts?by=group")
    steps = [
        int(text) for text in tab.page.locator(".vbody .cell:nth-child(5)").all_text_contents()
    ]
    assert steps == sorted(steps, reverse=True)
    assert tab.page.get_by_label("Phase").input_value() == "train"
    tab.page.keyboard.press("[")
    tab.ready(f"#/run/train/rollouts?by=group&step={steps[0]}")
    tab.page.keyboard.press("[")
    tab.ready(f"#/run/train/rollouts?by=group&step={steps[0] - 1}")
    tab.page.get_by_label("Phase").select_option("*")
    tab.ready("#/run/train/rollouts?by=group&phase=*")
    total = page.get("/api/runs/train/groups").json()["total"]
    assert tab.page.locator(".vtable").get_attribute("aria-rowcount") == str(total)


def test_a_group_of_several_agents_is_a_tree_for_each(tab, page):
    run = part("deep/agents")
    groups = rows(page, "deep/agents", "groups", limit=50)
    group = next(each for each in groups if len({m["agent"] for m in each["members"]}) > 1)
    agents = list(dict.fromkeys(each["agent"] for each in group["members"]))
    tab.open(f"#/run/{run}/group/{part(group['group_id'])}")
    for agent in agents:
        tab.page.get_by_role("link", name=agent, exact=True).click()
        tab.ready(f"#/run/{run}/group/{part(group['group_id'])}?agent={agent}")
        own = [each for each in group["members"] if each["agent"] == agent]
        assert tab.page.locator(".ending").count() == len(own)
    tab.page.get_by_role("link", name="all", exact=True).click()
    tab.ready(f"#/run/{run}/group/{part(group['group_id'])}?agent=*")
    assert tab.page.locator(".ending").count() == len(group["members"])


ROW_IN_SIGHT = """() => {
  const top = document.querySelector(".vtable").getBoundingClientRect().top;
  const rows = [...document.querySelectorAll(".vbody .vrow a")];
  return rows.find((row) => row.getBoundingClientRect().top > top + 100)?.getAttribute("href");
}"""


def test_going_back_leads_to_the_row_one_came_from(browser, start, tmp_path):
    golden_kit.unpack("demo-seed1", tmp_path / "demo")
    tab = Tab(browser, start(tmp_path / "demo").link)
    tab.open("#/run/demo/rollouts")
    table = tab.page.locator(".vtable")
    table.evaluate("(box) => { box.scrollTop = 9000; }")
    tab.page.wait_for_function("() => history.state?.table === 9000")
    # By its address: while rows are still loading, another one may become the twentieth.
    address = tab.page.wait_for_function(ROW_IN_SIGHT).json_value()
    tab.page.locator(f".vbody .vrow a[href='{address}']").click()
    tab.ready(address)
    assert tab.page.evaluate("() => scrollY") == 0
    tab.page.go_back()
    tab.ready("#/run/demo/rollouts")
    assert table.evaluate("(box) => box.scrollTop") == 9000
    tab.page.context.close()
    assert tab.said == []


def test_a_row_that_is_pressed_while_its_values_arrive_opens(browser, start, tmp_path):
    """A row that is drawn anew between press and release gets no click."""
    golden_kit.unpack("demo-seed1", tmp_path / "demo")
    tab = Tab(browser, start(tmp_path / "demo").link)
    held = []
    tab.page.route("**/previews*", lambda route: held.append(route))
    tab.open("#/run/demo/rollouts")
    address = tab.page.wait_for_function(ROW_IN_SIGHT).json_value()
    tab.page.wait_for_timeout(500)
    tab.page.locator(f".vbody .vrow a[href='{address}']").hover()
    tab.page.mouse.down()
    with tab.page.expect_response("**/previews*"):
        held.pop().continue_()
    tab.page.wait_for_timeout(200)
    tab.page.mouse.up()
    tab.ready(address)
    tab.page.context.close()


def test_runs_are_compared_with_the_first_that_was_chosen(browser, start, tmp_path):
    names = ["seed 0", "a:b", "seed,1"]
    for name, packed in zip(names, ("demo", "demo-seed1", "demo-seed1"), strict=True):
        golden_kit.unpack(packed, tmp_path / "runs" / name)
    tab = Tab(browser, start(tmp_path / "runs").link)
    button = tab.page.get_by_role("button", name="Compare")
    for name in names[1:]:
        assert button.is_disabled()
        tab.page.get_by_label(f"Choose {name}").check()
    assert button.inner_text() == "Compare 2 runs"
    assert tab.texts(".bar [role=status]") == ["a:b is the baseline"]
    tab.page.get_by_label("Choose seed 0").check()
    button.click()
    tab.ready("#/compare?arm=a%3Ab&arm=seed%2C1&arm=seed+0")
    rows = tab.page.locator(".page > .scroll tbody tr")
    assert "baseline" in rows.nth(0).inner_text()
    assert "seed,1 against a:b" in tab.texts(".page h2")
    assert tab.page.locator(".page > section th", has_text="97.5 % interval").count() == 1
    other = tab.page.locator(".page > details")
    other.locator("> summary").click()
    other.get_by_role("link", name="rollout").first.click()
    tab.page.wait_for_function("() => location.hash.startsWith('#/run/a%3Ab/rollout/')")
    tab.page.wait_for_selector(".conversation")
    tab.page.go_back()
    tab.page.get_by_label("Phase of seed 0").select_option("eval_before")
    tab.ready("#/compare?arm=a%3Ab%3Aeval_after&arm=seed%2C1%3Aeval_after&arm=seed+0%3Aeval_before")
    assert "lower" in rows.nth(2).inner_text()
    tab.page.get_by_label("Baseline", exact=True).select_option("seed 0")
    tab.ready("#/compare?arm=seed+0%3Aeval_before&arm=a%3Ab%3Aeval_after&arm=seed%2C1%3Aeval_after")
    assert "baseline" in rows.nth(0).inner_text()
    assert all("higher" in rows.nth(at).inner_text() for at in (1, 2))
    tab.page.context.close()
    assert tab.said == []
