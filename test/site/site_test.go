// SPDX-License-Identifier: Apache-2.0

// Package site tests the documentation's site, which make site makes, in a browser.
package site

import (
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/browser"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

const built = "../../bin/site"

// TestDiagrams looks at the page of sequence diagrams on a screen and on a telephone, in light and
// dark: they are drawn, can be read, and can be made larger.
func TestDiagrams(t *testing.T) {
	needs.Built(t, filepath.Join(built, "explanation/flows.html"), "site")
	server := httptest.NewServer(http.FileServer(http.Dir(built)))
	defer server.Close()

	const least = 11 // px of letters

	for _, size := range []struct {
		name          string
		width, height int
	}{
		{"wide", 1600, 1000}, {"narrow", 390, 844},
	} {
		for _, colours := range []string{"light", "dark"} {
			t.Run(size.name+" "+colours, func(t *testing.T) {
				b := browser.Start(t, "../../bin/site-pictures")
				b.Look(size.width, size.height, colours)
				b.Visit(server.URL + "/explanation/flows.html")
				b.Eventually(`document.querySelectorAll(".diagram .small svg").length === 4`)

				var letters float64
				b.Evaluate(&letters, `Math.min(...[...document.querySelectorAll(".diagram .small svg")].map(
					(svg) => parseFloat(getComputedStyle(svg.querySelector(".messageText")).fontSize) *
						svg.getBoundingClientRect().width / svg.viewBox.baseVal.width))`)
				if letters < least {
					t.Errorf("letters have %.1f px, want at least %d", letters, least)
				}
				if b.Is("document.documentElement.scrollWidth > innerWidth") {
					t.Error("the page is wider than the window")
				}
				checkContrast(t, b)
				b.Screenshot("flows-" + size.name + "-" + colours)
				checkZoom(t, b)
				b.Screenshot("zoom-" + size.name + "-" + colours)

				if all := b.Complaints(); len(all) > 0 {
					t.Errorf("the page complains: %v", all)
				}
			})
		}
	}
}

// checkContrast compares texts of the diagrams with what is behind them, by the formula of WCAG 2.2,
// https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio.
func checkContrast(t *testing.T, b *browser.Page) {
	t.Helper()
	const least = 4.5 // of level AA

	var got map[string]float64
	b.Evaluate(&got, `(() => {
		const light = (color) => {
			const [r, g, b] = color.match(/[\d.]+/g).slice(0, 3).map((v) => v / 255).map(
				(v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
			return 0.2126 * r + 0.7152 * g + 0.0722 * b
		}
		const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
		const page = light(getComputedStyle(document.body).backgroundColor)
		const fill = (selector) => light(getComputedStyle(document.querySelector(selector)).fill)
		return {
			message: ratio(page, fill(".diagram .small .messageText")),
			actor: ratio(fill(".diagram .small rect.actor"), fill(".diagram .small text.actor > tspan")),
			note: ratio(fill(".diagram .small rect.note"), fill(".diagram .small .noteText > tspan")),
		}
	})()`)
	for name, ratio := range got {
		if ratio < least {
			t.Errorf("%s has a contrast of %.1f:1, want %.1f:1", name, ratio, least)
		}
	}
}

// checkZoom makes a diagram larger by button and key, and closes it.
func checkZoom(t *testing.T, b *browser.Page) {
	t.Helper()
	width := func() (width float64) {
		b.Evaluate(&width, `document.querySelector(".diagram .large svg").getBoundingClientRect().width`)
		return width
	}

	b.Is(`(document.querySelector(".diagram .small").click(), true)`)
	b.Eventually(`document.querySelector("dialog[open] .large svg")`)
	fitting := width()
	b.Is(`(document.querySelector("dialog[open] [title^=Larger]").click(), true)`)
	b.Press("+")
	b.Eventually(`document.querySelector("dialog[open] output").innerText !== ""`)
	if larger := width(); larger < 1.5*fitting {
		t.Errorf("it was %.0f px wide and is %.0f px, want 25 %% more two times", fitting, larger)
	}
	if !b.Is(`(() => { const v = document.querySelector("dialog[open] .view")
		return v.scrollWidth > v.clientWidth })()`) {
		t.Error("what is larger than the window cannot be moved")
	}
}
