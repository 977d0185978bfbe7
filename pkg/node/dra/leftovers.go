package dra

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Leftovers removes metadata files (KEP-5304) of claims that are not prepared. The library writes them at the end of a Prepare
// (metadata.go in k8s.io/dynamic-resource-allocation/kubeletplugin), even if the claim was unprepared meanwhile.
type Leftovers struct {
	// DriverDir is the driver's directory, below which a claim's directory is named by namespace and name. CDIDir has files
	// that are named by the claim's UID.
	DriverDir, CDIDir string
	// Claims returns the journal's attachments. They include a claim before anything is written for it.
	Claims func() []journal.Attachment
	Log    logr.Logger
}

const (
	metadataPrefix = v1alpha1.GroupName + "_metadata_" // of the library's CDI files; the claim's UID follows
	leftoversEvery = time.Minute
)

// Run removes files at once and every leftoversEvery until ctx ends.
func (l *Leftovers) Run(ctx context.Context) error {
	for {
		if err := l.Remove(); err != nil {
			l.Log.Error(err, "Files that nobody needs any more remain", "retry", leftoversEvery.String())
		}
		if !loop.Sleep(ctx, leftoversEvery) {
			return nil
		}
	}
}

// Remove removes the files of claims that are not prepared. It may be called at any time.
func (l *Leftovers) Remove() error {
	files, err1 := filepath.Glob(filepath.Join(l.CDIDir, metadataPrefix+"*.json"))
	unfinished, err2 := filepath.Glob(filepath.Join(l.CDIDir, "."+metadataPrefix+"*.tmp")) // of an agent that was killed
	directories, err3 := filepath.Glob(filepath.Join(l.DriverDir, "dra-device-metadata", "*_*"))
	errs := []error{err1, err2, err3}
	// The journal is read after the directories, so it has the claims of all files that were found.
	prepared := map[string]bool{} // by UID, and by the name of the directory
	for _, a := range l.Claims() {
		prepared[string(a.Claim.UID)], prepared[a.Claim.Namespace+"_"+a.Claim.Name] = true, true
	}
	for _, path := range slices.Concat(files, unfinished, directories) {
		claim := filepath.Base(path)
		if ofFile, isFile := strings.CutPrefix(strings.TrimPrefix(claim, "."), metadataPrefix); isFile {
			claim, _, _ = strings.Cut(ofFile, "_")
		}
		if !prepared[claim] {
			errs = append(errs, os.RemoveAll(path)) // no error if it is gone already
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("metadata of claims that are gone: %w", err)
	}
	return nil
}
